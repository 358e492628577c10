"""What a trainer holds of the runtime, wherever it runs: beside it in a thread, or in a process of its own."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from pace_agent.engine.base import WeightSource
from pace_agent.rollout.runtime import Runtime
from pace_agent.types import Batch

P = ParamSpec("P")
T = TypeVar("T")


class RuntimeHandle(Protocol):
    """All methods but `stop` belong to the trainer's thread, and block. It is a trainer's batch source."""

    def start(self, state: Mapping[str, Any] | None = None) -> None:
        """Begin to build the runtime, load `state` if given, and start the engine."""

    def started(self) -> None:
        """Wait until the engine is up. Raises what went wrong on the way."""

    def begin(self) -> None:
        """Start rollouts."""

    def next_batch(self) -> Batch | None: ...

    def step_ended(self, weights: WeightSource) -> int: ...

    def publish(self, weights: WeightSource) -> None:
        """Give the engine these weights under the version that it has."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def ask(self, question: Callable[Concatenate[Runtime, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """`await question(runtime, *args, **kwargs)` where the runtime is. A process wants a function of a module."""
        ...

    def stop(self) -> None:
        """Ask the run to end; returns at once. Callable from a signal handler, at any time after `start`."""

    def close(self) -> None:
        """Cancel every rollout, close environments and engine. Closing twice is fine."""


async def next_batch(runtime: Runtime) -> Batch | None:
    return await runtime.next_batch()


async def step_ended(runtime: Runtime, weights: WeightSource) -> int:
    return await runtime.step_ended(weights)


async def publish(runtime: Runtime, weights: WeightSource) -> None:
    await runtime.publish(weights, runtime.version)


async def begin(runtime: Runtime) -> None:
    runtime.begin()


async def state_dict(runtime: Runtime) -> dict[str, Any]:
    return runtime.state_dict()


async def load_state_dict(runtime: Runtime, state: Mapping[str, Any]) -> None:
    runtime.load_state_dict(state)


async def end(runtime: Runtime) -> None:
    await runtime.aclose()


class Asking(ABC):
    """What every handle does by asking; where the runtime is, is up to `ask`."""

    @abstractmethod
    def ask(
        self, question: Callable[Concatenate[Runtime, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T: ...

    def begin(self) -> None:
        self.ask(begin)

    def next_batch(self) -> Batch | None:
        return self.ask(next_batch)

    def step_ended(self, weights: WeightSource) -> int:
        return self.ask(step_ended, weights)

    def publish(self, weights: WeightSource) -> None:
        self.ask(publish, weights)

    def state_dict(self) -> dict[str, Any]:
        return self.ask(state_dict)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ask(load_state_dict, state)


class Building(Asking):
    """A handle whose runtime `build` makes on an event loop of this process."""

    def __init__(self, build: Callable[[], Runtime]) -> None:
        self._build = build
        self._runtime: Runtime | None = None
        self._stopping = False
        """Whether a stop came, maybe while the runtime was still being built."""
        self._closed = False

    async def _start(self, state: Mapping[str, Any] | None) -> None:
        self._runtime = self._build()
        if state is not None:
            self._runtime.load_state_dict(state)
        if self._stopping:
            self._runtime.stop()
        await self._runtime.start()


def end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is left on a loop that stands still, and wait for its end."""
    for task in (left := asyncio.all_tasks(loop)):
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
