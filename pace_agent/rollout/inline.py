"""The runtime in the trainer's own thread, on virtual time: it runs while the trainer asks, and while time is spent."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from pace_agent.clock import VirtualClock
from pace_agent.errors import RunError
from pace_agent.rollout import handle
from pace_agent.rollout.runtime import Runtime
from pace_agent.types import Batch

P = ParamSpec("P")
T = TypeVar("T")
REAL_SECONDS = frozenset({"pool/draw_seconds"})
"""Metrics that measure this machine. Left out, so that two runs give the same rows."""


class RuntimeInline(handle.Building):
    """A `RuntimeHandle`. `build` makes the runtime, with `clock` as its clock.

    While the trainer computes, no virtual time passes; `spend` then lets its seconds pass, and rollouts go on.
    """

    def __init__(self, build: Callable[[], Runtime], clock: VirtualClock) -> None:
        super().__init__(build)
        self._loop = clock.loop

    def start(self, state: Mapping[str, Any] | None = None) -> None:
        self._run(self._start(state))

    def started(self) -> None:
        if self._runtime is None:
            raise RunError("the runtime was not started")

    def ask(self, question: Callable[Concatenate[Runtime, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._closed:
            raise RunError("the runtime is closed")
        self.started()
        assert self._runtime is not None
        return self._run(question(self._runtime, *args, **kwargs))

    def next_batch(self) -> Batch | None:
        batch = super().next_batch()
        if batch is None:
            return None
        return replace(batch, metrics={k: v for k, v in batch.metrics.items() if k not in REAL_SECONDS})

    def spend(self, seconds: float) -> None:
        """Let so much virtual time pass."""
        self._run(asyncio.sleep(seconds))

    def stop(self) -> None:
        self._stopping = True
        if not self._closed and self._runtime is not None:
            self._runtime.stop()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._runtime is not None:
                self._run(self._runtime.aclose())
        finally:
            handle.end_tasks(self._loop)
            self._loop.close()

    def _run(self, awaitable: Awaitable[T]) -> T:
        task = asyncio.ensure_future(awaitable, loop=self._loop)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            task.cancel()  # where the loop itself could not go on, or Ctrl-C came
            raise
