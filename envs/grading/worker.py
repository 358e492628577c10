"""The process that compares mathematical answers. It may hang or die on an answer; its parent then starts another.

One JSON object a line comes in (`gold`, `answer`, `seconds`), one goes out (`equal`, `gold_read`). The process ends
with its input. If a comparison outlasts its seconds and nobody is there any more to kill the process, an alarm does:
the default action of the signal needs no help from an interpreter that is stuck in a multiplication.
"""

import contextlib
import json
import logging
import os
import re
import resource
import signal
import sys
from typing import Any

MEMORY = 2 << 30
"""Bytes of address space."""
GRACE = 2.0
"""Seconds after the deadline at which the alarm ends the process."""

_SCIENTIFIC = re.compile(r"(?<![\w.])(-?\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})(?!\w)")


def serve() -> None:
    """Answer requests until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not mix with the replies
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    read("1")  # loads everything
    _send(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + GRACE)
        reply = compare(request["gold"], request["answer"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(replies, reply)


def _send(replies: Any, reply: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def compare(gold: str, answer: str) -> dict[str, Any]:
    """Whether the answer equals the gold one; `gold_read` is False where the gold one has no mathematical reading."""
    from math_verify import verify

    try:
        wanted = read(gold)
    except (Exception, RecursionError, MemoryError):
        wanted = []
    if not any(not isinstance(part, str) for part in wanted):
        return {"equal": False, "gold_read": False}
    try:
        equal = verify(wanted, read(answer), timeout_seconds=None)
    except (Exception, RecursionError, MemoryError):
        equal = False
    return {"equal": bool(equal), "gold_read": True}


def read(answer: str) -> list[Any]:
    """What math-verify makes of one answer. Its time-outs are off: they can't stop a multiplication."""
    from math_verify import LatexExtractionConfig, parse

    plain = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", answer)
    config = (LatexExtractionConfig(boxed_match_priority=0),)
    found: list[Any] = parse(f"$\\boxed{{{plain}}}$", extraction_config=config, parsing_timeout=None)
    return found
