"""The runtime's event loop in a thread beside the trainer, which is synchronous."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from pace_agent.engine.base import EngineInfo, WeightSource
from pace_agent.errors import RunError
from pace_agent.rollout.runtime import Runtime
from pace_agent.types import Batch

T = TypeVar("T")


class RuntimeThread:
    """Calls from any thread, answers from the loop. `close` is safe to call twice.

    `build` makes the runtime on the loop, so that everything it holds belongs to that loop.
    """

    def __init__(self, build: Callable[[], Runtime]) -> None:
        self._build = build
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="pace-runtime", daemon=True)
        self._runner: asyncio.Task[None] | None = None
        self._starting: concurrent.futures.Future[EngineInfo] | None = None
        self._runtime: Runtime | None = None
        self._closed = False

    @property
    def runtime(self) -> Runtime:
        if self._runtime is None:
            raise RunError("the runtime was not started")
        return self._runtime

    def start(self, state: Mapping[str, Any] | None = None) -> None:
        """Begin to build the runtime, load `state` if given, and start the engine; `started` waits for the end of it.

        Rollouts begin with `begin`.
        """
        self._thread.start()
        self._starting = asyncio.run_coroutine_threadsafe(self._start(state), self._loop)

    def started(self) -> EngineInfo:
        """Wait until the engine is up. Raises what went wrong on the way."""
        if self._starting is None:
            raise RunError("the runtime was not started")
        return self._starting.result()

    def begin(self) -> None:
        """Start rollouts."""

        async def begin() -> None:
            self._runner = asyncio.create_task(self.runtime.run(), name="runtime")
            self._runner.add_done_callback(self._ended)

        self.call(begin())

    def next_batch(self) -> Batch | None:
        return self.call(self.runtime.next_batch())

    def step_ended(self, weights: WeightSource) -> int:
        return self.call(self.runtime.step_ended(weights))

    def state_dict(self) -> dict[str, Any]:
        return self.call(_async(self.runtime.state_dict))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.call(_async(lambda: self.runtime.load_state_dict(state)))

    def stop(self) -> None:
        """Ask the run to end; returns at once. Callable from a signal handler."""
        if not self._closed and self._runtime is not None:
            self._loop.call_soon_threadsafe(self._runtime.stop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result."""
        if self._closed:
            work.close()
            raise RunError("the runtime is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RunError("the runtime ended while the trainer waited for it") from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel every rollout, close environments and engine, end the thread."""
        if self._closed:
            return
        if not self._thread.is_alive():
            self._closed = True
            self._loop.close()
            return
        try:
            if self._runtime is not None:
                self.call(self._runtime.aclose())
        finally:
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _start(self, state: Mapping[str, Any] | None) -> EngineInfo:
        self._runtime = self._build()
        if state is not None:
            self._runtime.load_state_dict(state)
        return await self._runtime.start()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.runtime.fail(error)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for task in (left := asyncio.all_tasks(self._loop)):
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())


async def _async(function: Callable[[], T]) -> T:
    return function()
