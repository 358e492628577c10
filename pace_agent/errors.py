"""The error tree, and the one boundary that assigns a failure to a layer.

The model: a bad rollout is data, not a crash. Whatever goes wrong inside one rollout becomes a `StopReason` with a
message, is counted, and the run goes on until too large a share fails. Everything else rises.

* `UserError`: bad input. The message names the key, file or value and the closest valid one. Exit code 2.
* `RunError`: the run can't go on. Exit code 1.
* `EngineError`, `SandboxError`, `EnvironmentFault`, `GraderError`: one layer of one rollout failed.

Every error here pickles: its only argument is its message.
"""

import asyncio
from collections.abc import Iterable
from difflib import get_close_matches

from pace_agent.types import StopReason


class PaceError(Exception):
    """Base of every error that this package raises on purpose."""


class UserError(PaceError):
    """Bad input: what was wrong, where, and what to do."""


class RunError(PaceError):
    """The run can't go on."""


class EngineError(PaceError):
    """The engine could not generate or take new weights."""


class SandboxError(PaceError):
    """The sandbox could not be opened, or died for a reason that is not the model's."""


class EnvironmentFault(PaceError):
    """The environment, or a tool's own code, raised."""


class GraderError(PaceError):
    """The reward function raised, or returned None or a number that is not finite."""


LAYERS: tuple[tuple[type[BaseException], StopReason], ...] = (
    (asyncio.CancelledError, StopReason.CANCELLED),
    (EngineError, StopReason.FAILED_ENGINE),
    (SandboxError, StopReason.FAILED_SANDBOX),
    (GraderError, StopReason.FAILED_GRADER),
    (EnvironmentFault, StopReason.FAILED_ENVIRONMENT),
)


def layer_of(error: BaseException) -> StopReason:
    """The stop reason for an exception that ended a rollout; an unknown one is a fault of this package."""
    for kind, reason in LAYERS:
        if isinstance(error, kind):
            return reason
    return StopReason.FAILED_ROLLOUT


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean x?' for the closest known word, or a list of a few known ones."""
    names = sorted(known)
    close = get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f" Did you mean {close[0]!r}?"
    if not names:
        return ""
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f" Known: {listed}."
