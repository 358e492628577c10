"""Reward functions: what they are given, how they are called, how they are loaded by name.

A reward function takes any of these by name, and returns a number or a mapping of named numbers, whose sum is the
reward. It may be asynchronous.

* `answer`: the text of the model's final turn
* `messages`: the whole conversation, as a tuple of `Message`
* `task`: the `Task`
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from pace_agent.errors import EngineError, GraderError, SandboxError, UserError, did_you_mean
from pace_agent.importing import load_object
from pace_agent.types import Message, Task

RewardFunction = Callable[..., Any]

GIVEN = ("answer", "messages", "task")


def load_reward(target: str) -> RewardFunction:
    """The function that `module:function` or `file.py:function` names."""
    found = load_object(target)
    if not callable(found):
        raise UserError(f"{target!r} is a {type(found).__name__}, not a function")
    wanted(found)
    return found  # type: ignore[no-any-return]


def wanted(function: RewardFunction) -> list[str]:
    """Which of the given values a reward function takes; UserError where it needs something else."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return list(GIVEN)
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.name in GIVEN and parameter.kind is not parameter.POSITIONAL_ONLY:
            names.append(parameter.name)
        elif parameter.default is parameter.empty:
            label = getattr(function, "__qualname__", repr(function))
            raise UserError(f"{label} asks for {parameter.name!r}.{did_you_mean(parameter.name, GIVEN)}")
    return names


async def score(
    function: RewardFunction, *, task: Task, messages: tuple[Message, ...], answer: str
) -> tuple[float, dict[str, float]]:
    """The reward and its named parts. GraderError where the function raises or returns no finite number."""
    given = {"answer": answer, "messages": messages, "task": task}
    label = getattr(function, "__qualname__", repr(function))
    try:
        value = function(**{name: given[name] for name in wanted(function)})
        if inspect.isawaitable(value):
            value = await value
    except (GraderError, SandboxError, EngineError):
        raise
    except Exception as error:
        raise GraderError(f"{label} raised {type(error).__name__}: {error}") from error
    if isinstance(value, Mapping):
        parts = {str(name): _number(f"{label}, part {name!r},", part) for name, part in value.items()}
        return math.fsum(parts.values()), parts
    return _number(label, value), {}


def _number(label: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise GraderError(f"{label} returned {value!r}, expected a number") from None
    if not math.isfinite(number):
        raise GraderError(f"{label} returned {value!r}, expected a finite number")
    return number
