"""One event loop in a thread of its own, on which the synchronous `reset`, `step` and `close` of environments run.

It works whether or not the caller is inside a running loop, and everything that an environment opened stays on the loop
that it was opened on. The thread starts with the first call and ends with the process.
"""

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_pid = 0


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end and return the result. An interrupt of the caller cancels it."""
    loop = _running_loop()
    if threading.current_thread() is _thread:
        coroutine.close()
        raise RuntimeError("an environment's own code awaits areset, astep and aclose: no reset, step or close")
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop, _thread, _pid
    with _lock:
        if _loop is None or _pid != os.getpid():
            _loop, _pid = asyncio.new_event_loop(), os.getpid()
            _thread = threading.Thread(target=_serve, args=(_loop,), name="pace-agent environments", daemon=True)
            _thread.start()
        return _loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


@atexit.register
def _stop() -> None:
    with _lock:
        if _loop is not None and _thread is not None and _pid == os.getpid():
            _loop.call_soon_threadsafe(_loop.stop)
            _thread.join(timeout=5)
