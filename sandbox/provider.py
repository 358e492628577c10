"""Opens sessions: a pool of rooms that are ready, a bound on how many there are, and figures.

What always holds:

* A room serves one session, and is never given to a second one.
* `opened_total == closed_total + open` at every moment, and `aclose` brings `open` to 0.
* A room whose start fails or is cancelled is killed.

A provider belongs to the event loop that used it first.
"""

import asyncio
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

from pace_agent.errors import SandboxError
from pace_agent.sandbox.base import ExecResult, Outcome, SandboxSpec
from pace_agent.sandbox.fresh import Zygotes, run_in_session
from pace_agent.sandbox.room import Room
from pace_agent.sandbox.session import RoomSession

START_SECONDS = 30.0
"""A room that isn't ready by then is given up."""


class Rooms(Protocol):
    """Where the rooms of a backend come from."""

    async def start(self) -> None:
        """Make ready what all rooms share. SandboxError if there can be none here."""

    async def open(self, spec: SandboxSpec, *, fresh: bool) -> Room:
        """A room that was started and may not be ready yet. SandboxError if it can't be started.

        `fresh`: it serves executions that share nothing, one after the other, instead of a session.
        """

    async def aclose(self) -> None:
        """End every room, and what they share. Closing twice is fine."""


class Backend(Protocol):
    """What sandboxes are made of."""

    @property
    def name(self) -> str: ...

    @property
    def user(self) -> int | None:
        """Whom rooms run as, seen from outside; None: as we do."""

    @property
    def has_zygote(self) -> bool:
        """Whether its rooms can serve `fresh` executions by forking."""

    def rooms(self) -> Rooms: ...


@dataclass(frozen=True, slots=True)
class SandboxStats:
    """Figures since the start. Seconds are sums over sessions and calls."""

    open: int = 0
    """Sessions that are open now."""
    warm: int = 0
    """Rooms that are ready and not handed out."""
    opened_total: int = 0
    closed_total: int = 0
    calls_total: int = 0
    timeouts_total: int = 0
    open_seconds: float = 0.0
    exec_seconds: float = 0.0


class RoomProvider:
    """A `Provider`. `prewarm` rooms with the limits of `spec` are kept ready; at most `sessions` are open at once."""

    def __init__(
        self, backend: Backend, *, spec: SandboxSpec | None = None, prewarm: int = 0, sessions: int = 256
    ) -> None:
        self.backend = backend
        self.spec = spec or SandboxSpec()
        self._prewarm = prewarm
        self._slots = asyncio.Semaphore(sessions)
        self._starting = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        self._rooms = backend.rooms()
        self._zygotes = Zygotes(partial(self._start, fresh=True), self._called)
        self._warm: list[Room] = []
        self._warming: set[asyncio.Task[None]] = set()
        self._sessions: set[RoomSession] = set()
        self._counted: dict[str, Any] = defaultdict(int)
        self._closed = False

    async def open(self, spec: SandboxSpec | None = None) -> RoomSession:
        """A session with fresh state. Waits while `sessions` are open. SandboxError if no room can be had."""
        spec = spec or self.spec
        began = time.monotonic()
        await self._slots.acquire()
        try:
            room = self._take_warm(spec) or await self._start(spec)
        except BaseException:
            self._slots.release()
            raise
        session = RoomSession(spec, room, self._start, self._ended, self._called)
        self._sessions.add(session)
        self._count(opened_total=1, open_seconds=time.monotonic() - began)
        self._refill()
        return session

    async def run_fresh(
        self, code: str, *, stdin: bytes = b"", timeout: float | None = None, spec: SandboxSpec | None = None
    ) -> ExecResult:
        """See `Provider`. By a fork of a process that has the modules loaded, where the backend has one."""
        spec = spec or self.spec
        if self.backend.has_zygote:
            return await self._zygotes.run(spec, code, stdin, timeout)
        session = await self.open(spec)
        try:
            return await run_in_session(session, code, stdin, timeout)
        finally:
            await session.close()

    def stats(self) -> SandboxStats:
        return SandboxStats(open=len(self._sessions), warm=len(self._warm), **self._counted)

    async def aclose(self) -> None:
        """Close every session and end every process. Closing twice is fine."""
        self._closed = True
        for task in self._warming:
            task.cancel()
        await asyncio.gather(*self._warming, return_exceptions=True)
        rooms, self._warm = self._warm, []
        await asyncio.gather(*(room.end() for room in rooms), return_exceptions=True)
        await asyncio.gather(*(session.close() for session in list(self._sessions)))
        await self._zygotes.aclose()
        await self._rooms.aclose()

    async def __aenter__(self) -> Self:
        await self._rooms.start()
        self._refill()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # -- rooms

    async def _start(self, spec: SandboxSpec, *, fresh: bool = False) -> Room:
        async with self._starting:
            if self._closed:
                raise SandboxError("the sandbox provider is closed")
            room = await self._rooms.open(spec, fresh=fresh)
            try:
                async with asyncio.timeout(START_SECONDS):
                    await room.ready
            except SandboxError as error:
                end = await room.end()
                text = end.errors.strip() or f"it ended with status {end.status}"
                raise SandboxError(f"the {self.backend.name} sandbox did not start: {text}") from error
            except TimeoutError as error:
                await room.end()
                raise SandboxError(f"the {self.backend.name} sandbox was not ready in {START_SECONDS:.0f} s") from error
            except BaseException:
                room.kill()
                raise
            return room

    def _take_warm(self, spec: SandboxSpec) -> Room | None:
        while spec == self.spec and self._warm:
            room = self._warm.pop()
            if room.alive:
                return room
        return None

    def _refill(self) -> None:
        if self._closed:
            return
        for _ in range(self._prewarm - len(self._warm) - len(self._warming)):
            self._spawn_task(self._warm_one())

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)

    async def _warm_one(self) -> None:
        # On an error: whoever opens a session next meets the same one, where it can be told.
        with contextlib.suppress(SandboxError):
            self._warm.append(await self._start(self.spec))

    # -- figures

    def _ended(self, session: RoomSession) -> None:
        self._sessions.discard(session)
        self._slots.release()
        self._count(closed_total=1)

    def _called(self, result: ExecResult) -> None:
        late = result.outcome is Outcome.TIMEOUT
        self._count(calls_total=1, timeouts_total=int(late), exec_seconds=result.seconds)

    def _count(self, **added: float) -> None:
        for name, value in added.items():
            self._counted[name] += value
