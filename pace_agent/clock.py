"""The time that the asynchronous runtime reads. Everything that waits takes a clock, so that another can replace it."""

import asyncio
import time
from typing import Protocol


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
