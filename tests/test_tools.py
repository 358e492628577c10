"""Tools: what the model reads of a function, how arguments are checked, who is to blame when something raises."""

import asyncio
import functools
import json
import math
import threading
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pace_agent.errors import EnvironmentFault, SandboxError, UserError
from pace_agent.sandbox.base import ExecResult, Outcome, Session
from pace_agent.tools import Tool, ToolError, ToolSet, calculator, tool
from pace_agent.tools.base import declared_tools
from pace_agent.tools.calculator import evaluate
from pace_agent.tools.python import MAX_SHOWN, clip, python, told
from pace_agent.types import ToolCall


@tool
def ship(code: str, count: int = 1, speed: Literal["slow", "fast"] = "slow", title: str = "") -> dict[str, Any]:
    """Ship a parcel.

    It goes out today.

    Args:
        code: The postal code,
            with its zeros.
        count: How many.

    Returns:
        What was shipped.
    """
    return {"code": code, "count": count, "speed": speed}


def text(result: Any) -> str:
    assert isinstance(result.content, str)
    return result.content


def test_the_schema_comes_from_signature_and_docstring() -> None:
    assert ship.schema() == {
        "type": "function",
        "function": {
            "name": "ship",
            "description": "Ship a parcel.\n\nIt goes out today.",
            "parameters": {
                "type": "object",
                "properties": {
                    "code": {"type": "string", "description": "The postal code, with its zeros."},
                    "count": {"type": "integer", "default": 1, "description": "How many."},
                    "speed": {"type": "string", "enum": ["slow", "fast"], "default": "slow"},
                    "title": {"type": "string", "default": ""},
                },
                "required": ["code"],
            },
        },
    }
    ship.schema()["function"]["name"] = "changed"
    assert ship.schema()["function"]["name"] == "ship"


@pytest.mark.parametrize(
    ("arguments", "shipped"),
    [
        ({"code": "02134"}, {"code": "02134", "count": 1, "speed": "slow"}),
        ({"code": 2134, "count": "5.0"}, {"code": "2134", "count": 5, "speed": "slow"}),
        ({"code": "価格", "speed": "fast"}, {"code": "価格", "count": 1, "speed": "fast"}),
    ],
)
async def test_arguments_are_read_as_declared(arguments: dict[str, Any], shipped: dict[str, Any]) -> None:
    result = await ToolSet([ship]).call(ToolCall("ship", arguments))
    assert not result.error
    assert json.loads(result.content) == shipped
    assert shipped["code"] in result.content  # every script stays readable


@pytest.mark.parametrize(
    ("call", "told_to_the_model"),
    [
        (ToolCall("ship", {"code": "1", "count": "2026-01-15"}), ["'count'", "2026-01-15"]),
        (ToolCall("ship", {"count": 1}), ["'code' is missing"]),
        (ToolCall("ship", {"code": "1", "cout": 2}), ["no argument 'cout'", "'count'"]),
        (ToolCall("ship", {"code": ["1"]}), ["'code'"]),
        (ToolCall("ship", {"code": "1", "speed": "warp"}), ["'speed'", "'slow' or 'fast'"]),
        (ToolCall("shipp", {"code": "1"}), ["no tool 'shipp'", "'ship'"]),
        (ToolCall("", {}, error="the call is not JSON"), ["the call is not JSON"]),
        (ToolCall("ship", {"code": "1"}, error="cut off"), ["cut off"]),
    ],
)
async def test_a_bad_call_is_answered_and_not_run(call: ToolCall, told_to_the_model: list[str]) -> None:
    result = await ToolSet([ship]).call(call)
    assert result.error
    assert not result.executed
    assert result.message().role == "tool"
    assert result.message().name == call.name
    for part in told_to_the_model:
        assert part in result.content


async def test_who_is_to_blame() -> None:
    @tool
    def fail(how: str) -> str:
        """Fail in some way."""
        raise {"told": ToolError("no such row"), "bug": ValueError("oops"), "box": SandboxError("gone")}[how]

    tools = ToolSet([fail])
    result = await tools.call(ToolCall("fail", {"how": "told"}))
    assert (result.content, result.error, result.executed) == ("Error: no such row", True, True)
    with pytest.raises(EnvironmentFault, match="'fail' raised ValueError: oops"):
        await tools.call(ToolCall("fail", {"how": "bug"}))
    with pytest.raises(SandboxError, match="gone"):
        await tools.call(ToolCall("fail", {"how": "box"}))


async def test_cancellation_passes_through() -> None:
    @tool
    async def wait() -> None:
        """Wait for ever."""
        await asyncio.Event().wait()

    running = asyncio.create_task(ToolSet([wait]).call(ToolCall("wait")))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_an_asynchronous_tool_behind_a_synchronous_wrapper_is_awaited() -> None:
    async def inner(word: str) -> str:
        """Say a word."""
        await asyncio.sleep(0)
        return f"said {word}"

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    assert text(await ToolSet([wrapped]).call(ToolCall("inner", {"word": "hi"}))) == "said hi"


async def test_thread_moves_a_blocking_tool_out_of_the_loop() -> None:
    @tool(thread=True, name="away")
    def elsewhere() -> int:
        """Tell the thread."""
        return threading.get_ident()

    @tool
    def here() -> int:
        """Tell the thread."""
        return threading.get_ident()

    tools = ToolSet([elsewhere, here])
    assert text(await tools.call(ToolCall("away"))) != str(threading.get_ident())
    assert text(await tools.call(ToolCall("here"))) == str(threading.get_ident())


@dataclass
class Place:
    name: str
    rank: int


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("as it is\n", "as it is\n"),
        ({"価": [1, 2.5, None]}, '{"価": [1, 2.5, null]}'),
        (Place("a", 1), '{"name": "a", "rank": 1}'),
        ("bad \ud800 half", "bad ? half"),
    ],
)
async def test_results_become_text(value: Any, shown: str) -> None:
    @tool
    def give() -> Any:
        """Give a value."""
        return value

    assert text(await ToolSet([give]).call(ToolCall("give"))) == shown


class Desk:
    def __init__(self) -> None:
        self.notes: list[str] = []

    @tool
    def note(self, words: str) -> int:
        """Write a note."""
        self.notes.append(words)
        return len(self.notes)

    def close(self) -> None:
        """Never a tool."""

    def secret(self, words: str) -> str:
        """Never a tool."""
        return words


async def test_only_declared_methods_are_tools_and_they_are_bound() -> None:
    one, two = Desk(), Desk()
    tools = ToolSet(declared_tools(one))
    assert tools.names() == ["note"]
    assert "self" not in json.dumps(tools.schemas())
    assert text(await tools.call(ToolCall("note", {"words": "x"}))) == "1"
    assert text(await tools.call(ToolCall("secret", {"words": "x"}))).startswith("Error: there is no tool")
    assert one.note("y") == 2
    assert (one.notes, two.notes) == (["x", "y"], [])


def test_a_function_that_cannot_be_described_is_refused_when_declared() -> None:
    def silent(x: int) -> int:
        return x

    def untyped(x) -> int:  # type: ignore[no-untyped-def]
        """Some words."""
        return int(x)

    def loose(*x: int) -> int:
        """Some words."""
        return len(x)

    def misdescribed(word: str) -> str:
        """Some words.

        Args:
            wrod: A word.
        """
        return word

    with pytest.raises(UserError, match="'silent' has no docstring"):
        tool(silent)
    with pytest.raises(UserError, match="'x' has no type annotation"):
        tool(untyped)
    with pytest.raises(UserError, match="ordinary or keyword-only"):
        tool(loose)
    with pytest.raises(UserError, match=r"'wrod'.*Did you mean 'word'"):
        tool(misdescribed)
    with pytest.raises(UserError, match="two tools are named 'ship'"):
        ToolSet([ship, ship])


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3*7+2*4", "29"),
        ("(2 + 3) * -4", "-20"),
        ("6/2", "3"),
        ("1/3", "0.333333333333"),
        ("7 // 2 + 7 % 4", "6"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("2**1023", str(2**1023)),
        ("1e3 + 0.5", "1000.5"),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "x + 1",
        "__import__('os')",
        "'a' * 9",
        "True + 1",
        "[1][0]",
        "1 if 1 else 2",
        "9**9**9**9",
        "2**1025",
        "(2**600) * (2**600)",
        "1e308 * 10",
        "1/0",
        "0**-1",
        "(-8)**0.5",
        "3j",
        "1 << 99",
        "(" * 200 + "1" + ")" * 200,
        "-" * 400 + "1",
        "1" * 501,
        "1_0\x00",
    ],
)
def test_calculator_refuses(expression: str) -> None:
    with pytest.raises(ToolError):
        evaluate(expression)


@settings(max_examples=400, deadline=1000)
@given(
    st.one_of(
        st.text(max_size=600),
        st.text(alphabet="0123456789+-*/%() .e", max_size=600),
        st.lists(st.sampled_from(["9", "99999", "**", "*", "//", "%", "(", ")", "-", "e", "."]), max_size=120).map(
            "".join
        ),
    )
)
def test_calculator_never_raises_anything_else_and_stays_small(expression: str) -> None:
    try:
        value = evaluate(expression)
    except ToolError:
        return
    assert math.isfinite(value) if isinstance(value, float) else value.bit_length() <= 1024
    assert len(calculator(expression)) <= 320


class Recorder:
    """A session that answers with what it was told to."""

    def __init__(self, result: ExecResult) -> None:
        self.result, self.ran = result, []  # type: ExecResult, list[str]

    async def run_python(self, code: str, *, timeout: float | None = None) -> ExecResult:
        self.ran.append(code)
        return self.result


async def test_python_runs_in_the_session_that_the_model_never_sees() -> None:
    session = Recorder(ExecResult(Outcome.OK, stdout="4\n"))

    async def opened() -> Session:
        return session  # type: ignore[return-value]

    tools = ToolSet([python], session=opened)
    assert tools.needs_session
    assert list(python.schema()["function"]["parameters"]["properties"]) == ["code"]
    assert text(await tools.call(ToolCall("python", {"code": "2+2"}))) == "4"
    assert session.ran == ["2+2"]
    refused = await tools.call(ToolCall("python", {"code": "1", "session": "mine"}))
    assert "no argument 'session'" in refused.content
    with pytest.raises(EnvironmentFault, match="needs a sandbox"):
        await ToolSet([python]).call(ToolCall("python", {"code": "1"}))


@pytest.mark.parametrize(
    ("result", "parts"),
    [
        (ExecResult(Outcome.OK), ["(no output)"]),
        (ExecResult(Outcome.NONZERO, stderr="ValueError: x"), ["ValueError: x"]),
        (ExecResult(Outcome.NONZERO, exit_code=3), ["status 3"]),
        (ExecResult(Outcome.TIMEOUT, stdout="so far", seconds=10.0), ["so far", "more than 10 s"]),
        (ExecResult(Outcome.OOM, stderr="MemoryError"), ["MemoryError"]),
        (ExecResult(Outcome.OOM, state_lost=True), ["out of memory", "are gone"]),
        (ExecResult(Outcome.OUTPUT_LIMIT, stdout="y" * 9), ["wrote too much"]),
        (ExecResult(Outcome.KILLED), ["A signal ended"]),
        (
            ExecResult(Outcome.SANDBOX_DIED, state_lost=True),
            ["ended while the code ran", "Names defined before are gone"],
        ),
    ],
)
def test_an_execution_is_told_in_words(result: ExecResult, parts: list[str]) -> None:
    for part in parts:
        assert part in told(result)


def test_what_the_output_says_is_not_said_again() -> None:
    result = ExecResult(Outcome.TIMEOUT, stderr="Traceback\nStopped at the deadline after 10.0 s.\n", seconds=10.0)
    assert told(result) == "Traceback\nStopped at the deadline after 10.0 s."
    assert "code ran out of memory" not in told(ExecResult(Outcome.OOM, stderr="The sandbox ran out of memory.\n"))


def test_long_output_keeps_head_and_tail_and_says_how_much_is_missing() -> None:
    output = "".join(f"{number:05d} " for number in range(5000))
    shown = clip(output)
    assert len(shown) <= MAX_SHOWN
    head, _, rest = shown.partition("\n[")
    count, _, tail = rest.partition(" characters left out]\n")
    assert output.startswith(head)
    assert output.endswith(tail)
    assert len(head) + int(count) + len(tail) == len(output)
    assert clip("short") == "short"


def test_a_tool_is_still_a_function() -> None:
    assert isinstance(ship, Tool)
    assert ship("1", count=2) == {"code": "1", "count": 2, "speed": "slow"}
