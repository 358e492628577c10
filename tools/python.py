"""Python for the model: the code runs in the rollout's sandbox session, and names stay for the next call."""

from pace_agent.sandbox.base import ExecResult, Outcome, Session
from pace_agent.tools.base import tool

MAX_SHOWN = 8000
"""Characters of output that the model sees."""


@tool
async def python(session: Session, code: str) -> str:
    """Run Python code and return what it prints. Names stay defined for the next call.

    Args:
        code: The code. The value of a last expression is printed.
    """
    return told(await session.run_python(code))


def told(result: ExecResult) -> str:
    """An execution in words for the model, at most MAX_SHOWN characters of output."""
    output = "\n".join(part.rstrip("\n") for part in (result.stdout, result.stderr) if part.strip())
    notes = [note for note in (_ending(result, output), _loss(result)) if note]
    return "\n".join(part for part in (clip(output), " ".join(notes)) if part)


def _ending(result: ExecResult, output: str) -> str:
    """What became of the code, where the output doesn't say it."""
    # A backend may have written the reason as the last line of stderr.
    last = result.stderr.rstrip().rpartition("\n")[2].lower()
    match result.outcome:
        case Outcome.TIMEOUT if "stopped" not in last:
            return f"Stopped: the code ran for more than {result.seconds:.0f} s."
        case Outcome.OOM if "memory" not in last:
            return "The code ran out of memory."
        case Outcome.KILLED:
            return "A signal ended the code."
        case Outcome.OUTPUT_LIMIT:
            return "Stopped: the code wrote too much."
        case Outcome.SANDBOX_DIED if "ended" not in last:
            return "The sandbox ended while the code ran."
        case Outcome.NONZERO if not output:
            return f"(no output; it ended with status {result.exit_code})"
        case Outcome.OK if not output:
            return "(no output)"
        case _:
            return ""


def _loss(result: ExecResult) -> str:
    return "Names defined before are gone." if result.state_lost else ""


def clip(text: str, limit: int = MAX_SHOWN) -> str:
    """The head and the tail of a text that is longer than `limit`, with the number of characters left out between."""
    if len(text) <= limit:
        return text
    room = limit - len(_cut(len(text)))
    head = room - room // 2
    tail = len(text) - room // 2
    return text[:head] + _cut(tail - head) + text[tail:]


def _cut(count: int) -> str:
    return f"\n[{count} characters left out]\n"
