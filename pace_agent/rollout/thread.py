"""The runtime's event loop in a thread beside the trainer: for tests, and where another process is not wanted."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from pace_agent.errors import RunError
from pace_agent.rollout import handle
from pace_agent.rollout.runtime import Runtime

P = ParamSpec("P")
T = TypeVar("T")


class RuntimeThread(handle.Building):
    """A `RuntimeHandle`. `build` makes the runtime on the loop, so that everything it holds belongs to that loop."""

    def __init__(self, build: Callable[[], Runtime]) -> None:
        super().__init__(build)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="pace-runtime", daemon=True)
        self._starting: concurrent.futures.Future[None] | None = None

    def start(self, state: Mapping[str, Any] | None = None) -> None:
        self._thread.start()
        self._starting = asyncio.run_coroutine_threadsafe(self._start(state), self._loop)

    def started(self) -> None:
        if self._starting is None:
            raise RunError("the runtime was not started")
        self._starting.result()

    def ask(self, question: Callable[Concatenate[Runtime, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._closed:
            raise RunError("the runtime is closed")
        self.started()

        async def answer() -> T:
            assert self._runtime is not None
            return await question(self._runtime, *args, **kwargs)

        future = asyncio.run_coroutine_threadsafe(answer(), self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RunError("the runtime ended while the trainer waited for it") from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    def stop(self) -> None:
        self._stopping = True
        if not self._closed and self._runtime is not None:
            self._loop.call_soon_threadsafe(self._runtime.stop)

    def close(self) -> None:
        if self._closed:
            return
        try:
            if self._runtime is not None:
                asyncio.run_coroutine_threadsafe(self._runtime.aclose(), self._loop).result()
        finally:
            self._closed = True
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
            self._loop.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            handle.end_tasks(self._loop)
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
