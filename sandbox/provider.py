"""Opens sessions: a pool of rooms that are ready, a bound on how many there are, and figures.

What always holds:

* A room serves one session, and is never given to a second one.
* `opened_total == closed_total + open` at every moment, and `aclose` brings `open` to 0.
* A room whose start fails or is cancelled is killed.

A provider belongs to the event loop that used it first.
"""

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from pace_agent.errors import SandboxError
from pace_agent.sandbox.base import ExecResult, Outcome, SandboxSpec
from pace_agent.sandbox.launch import Launcher, Plan
from pace_agent.sandbox.room import Room
from pace_agent.sandbox.session import RoomSession

START_SECONDS = 30.0
"""A room that isn't ready by then is given up."""


OWN_PROCESSES = 2
"""The first process of a namespace and the supervisor: `SandboxSpec.processes` counts the kernel and what it starts."""


class Backend(Protocol):
    """What a room is made of, for those that the launcher starts."""

    @property
    def name(self) -> str: ...

    @property
    def user(self) -> int | None:
        """Unprivileged user id to become; None to stay who we are."""

    @property
    def expose(self) -> tuple[str, ...]:
        """Folders that this user must be able to reach."""

    def plan(self, spec: SandboxSpec) -> Plan: ...


def agent_arguments(spec: SandboxSpec, *, root: str, namespaced: bool) -> list[str]:
    """The agent's arguments: its socket, and what it keeps to."""
    limits = {
        "DATA": spec.memory,
        "AS": 4 * spec.memory,
        "CPU": spec.cpu_seconds,
        "FSIZE": spec.disk,
        "NOFILE": spec.descriptors,
        "CORE": 0,
        "MEMLOCK": 1 << 16,
        "MSGQUEUE": 0,
    }
    if namespaced:  # elsewhere it would count every process that the user has
        limits["NPROC"] = spec.processes + OWN_PROCESSES
    config = {
        "root": root,
        "captured": spec.captured,
        "namespaced": namespaced,
        "outside": os.readlink("/proc/self/ns/pid"),
        "limits": limits,
    }
    return ["3", json.dumps(config)]


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
        self._spec = spec or SandboxSpec()
        self._prewarm = prewarm
        self._slots = asyncio.Semaphore(sessions)
        self._starting = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        self._launcher: Launcher | None = None
        self._launcher_lock = asyncio.Lock()
        self._plans: dict[SandboxSpec, Plan] = {}
        self._warm: list[Room] = []
        self._warming: set[asyncio.Task[None]] = set()
        self._sessions: set[RoomSession] = set()
        self._stats = SandboxStats()
        self._closed = False

    async def open(self, spec: SandboxSpec | None = None) -> RoomSession:
        """A session with fresh state. Waits while `sessions` are open. SandboxError if no room can be had."""
        spec = spec or self._spec
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

    def stats(self) -> SandboxStats:
        return replace(self._stats, open=len(self._sessions), warm=len(self._warm))

    async def aclose(self) -> None:
        """Close every session and end every process. Closing twice is fine."""
        self._closed = True
        for task in self._warming:
            task.cancel()
        await asyncio.gather(*self._warming, return_exceptions=True)
        rooms, self._warm = self._warm, []
        await asyncio.gather(*(room.end() for room in rooms), return_exceptions=True)
        await asyncio.gather(*(session.close() for session in list(self._sessions)))
        if self._launcher is not None:
            await self._launcher.aclose()

    async def __aenter__(self) -> Self:
        await self._ready_launcher()
        self._refill()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # -- rooms

    async def _ready_launcher(self) -> Launcher:
        async with self._launcher_lock:
            if self._closed:
                raise SandboxError("the sandbox provider is closed")
            if self._launcher is None or not self._launcher.alive:
                dead, self._launcher = self._launcher, None
                if dead is not None:
                    await dead.aclose()
                launcher = Launcher(self.backend.user, self.backend.expose)
                await launcher.start()
                self._launcher = launcher
            return self._launcher

    async def _start(self, spec: SandboxSpec) -> Room:
        async with self._starting:
            launcher = await self._ready_launcher()
            plan = self._plans.get(spec)
            if plan is None:
                plan = self._plans[spec] = self.backend.plan(spec)
            near, far = socket.socketpair()
            with far:
                room = Room(launcher.spawn(plan, far))
            try:
                await self._connect(room, near)
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

    @staticmethod
    async def _connect(room: Room, near: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: room, sock=near)
        except BaseException:
            near.close()
            raise

    def _take_warm(self, spec: SandboxSpec) -> Room | None:
        while spec == self._spec and self._warm:
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
            self._warm.append(await self._start(self._spec))

    # -- figures

    def _ended(self, session: RoomSession) -> None:
        self._sessions.discard(session)
        self._slots.release()
        self._count(closed_total=1)

    def _called(self, result: ExecResult) -> None:
        late = result.outcome is Outcome.TIMEOUT
        self._count(calls_total=1, timeouts_total=int(late), exec_seconds=result.seconds)

    def _count(self, **added: float) -> None:
        self._stats = replace(self._stats, **{key: getattr(self._stats, key) + value for key, value in added.items()})
