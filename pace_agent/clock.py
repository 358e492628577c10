"""The time that the asynchronous runtime reads: real time, or virtual time, which passes when something costs it.

Everything that waits or stamps a time takes a clock or asks the running event loop, so the same code runs on both.

What holds on virtual time:

* It moves only when nothing can run: then it jumps to the next timer. Computing takes no virtual time, and no second of
  it is really waited for.
* Everything happens in one thread, in an order that follows from the timers alone. What `asyncio.to_thread` is given
  is over when it returns.
* When nothing can run and no timer is set, nothing ever will: RunError says so.
* There is no input or output to wait for: a socket, a pipe or a process on this loop is an OSError. How long one takes
  depends on the machine, and no cost model knows it.
"""

import asyncio
import concurrent.futures
import contextvars
import math
import selectors
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, TypeVarTuple

from pace_agent.errors import RunError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
NO_FILES = "the virtual clock waits for no socket, pipe or process; what needs one needs the wall clock"


class Clock(Protocol):
    """Seconds since an arbitrary start, and a sleep on the same scale."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class WallClock:
    """Real time, in seconds since the clock was made."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._started

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class VirtualClock:
    """Virtual time, which belongs to `loop`: it passes while that loop runs. Close the loop at the end."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()

    def now(self) -> float:
        return self.loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's own event loop over virtual time, which begins at 0."""

    def __init__(self) -> None:
        self._now = 0.0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "pace-virtual")
        super().__init__(_Jumps(self._jump))
        self._jump(0.0)

    def time(self) -> float:
        return self._now

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Time moves on by every delay above 0, also by one that is lost in rounding: who waits for a rest of it gets
        there."""
        when = self._now + delay if delay <= 0 else max(self._now + delay, math.nextafter(self._now, math.inf))
        return self.call_at(when, callback, *args, context=context)

    def _jump(self, seconds: float) -> None:
        self._now += seconds
        # asyncio runs the timers that lie before now + this. Its own value is below what a late `now` can resolve.
        self._clock_resolution = math.ulp(self._now)

    def run_in_executor(
        self, executor: concurrent.futures.Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> "asyncio.Future[T]":
        """The future is done on return: the loop stands still while a thread works."""
        future = self.create_future()
        try:
            future.set_result((executor or self._thread).submit(func, *args).result())
        except Exception as error:
            future.set_exception(error)
        return future

    async def _refuse(self, *args: object, **options: object) -> Any:
        raise OSError(NO_FILES)

    subprocess_exec = subprocess_shell = connect_read_pipe = connect_write_pipe = _refuse
    create_connection = create_unix_connection = create_datagram_endpoint = create_server = _refuse

    def close(self) -> None:
        super().close()
        self._thread.shutdown()


class _Jumps(selectors.BaseSelector):
    """In place of a wait for files: no time passes where something can run, else all of it up to the next timer."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        self._jump = jump
        self._keys: dict[int, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RunError("nothing can happen any more: everything waits for something else, and no timer is set")
        self._jump(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """The first is the pipe by which a loop wakes itself, which a loop that never waits has no use for."""
        if self._keys:
            raise OSError(NO_FILES)
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[number] = selectors.SelectorKey(fileobj, number, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def close(self) -> None:
        self._keys.clear()
