"""One asynchronous face for every environment: our own, and any Gymnasium environment that speaks text."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import gymnasium

from pace_agent.errors import EnvironmentFault
from pace_agent.types import Message

Observation = tuple[Message, ...]
StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]


@runtime_checkable
class AsyncEnv(Protocol):
    """What a rollout needs. Observations are the new messages, an action is the model's turn."""

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]: ...

    async def astep(self, action: Message) -> StepResult: ...

    async def aclose(self) -> None: ...


def as_async(env: gymnasium.Env[Any, Any]) -> AsyncEnv:
    """The environment itself where it is asynchronous, else a wrapper that steps it in a thread."""
    inner = env.unwrapped
    if isinstance(inner, AsyncEnv):
        return inner
    return ThreadedEnv(env)


class ThreadedEnv:
    """A plain Gymnasium environment: text (or messages) in observations, the text of the turn as action.

    Its methods run in a worker thread, one at a time, so that a slow one holds up nobody else.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._env = env

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        task = (options or {}).get("task")
        seed = task.seed if task is not None else seed
        observation, info = await asyncio.to_thread(self._env.reset, seed=seed, options=options)
        return as_messages(observation), dict(info)

    async def astep(self, action: Message) -> StepResult:
        observation, reward, terminated, truncated, info = await asyncio.to_thread(self._env.step, action.content)
        messages = () if terminated or truncated else as_messages(observation)
        return messages, reward, terminated, truncated, dict(info)  # type: ignore[return-value]

    async def aclose(self) -> None:
        await asyncio.to_thread(self._env.close)


def as_messages(observation: object) -> Observation:
    """A string is a user message; mappings with `role` and `content`, or messages, pass through."""
    if isinstance(observation, str):
        return (Message("user", observation),)
    if isinstance(observation, Message):
        return (observation,)
    if isinstance(observation, Sequence):
        return tuple(_as_message(item) for item in observation)
    raise EnvironmentFault(
        f"an observation must be a string or a sequence of messages, the environment gave {type(observation).__name__}"
    )


def _as_message(item: object) -> Message:
    if isinstance(item, Message):
        return item
    if isinstance(item, Mapping) and {"role", "content"} <= item.keys():
        return Message(item["role"], str(item["content"]), name=str(item.get("name", "")))
    raise EnvironmentFault(f"a message must have role and content, the environment gave {item!r}")
