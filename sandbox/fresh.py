"""Executions that share nothing: by zygotes where the backend has them, else each in a session of its own."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from pace_agent.errors import SandboxError
from pace_agent.sandbox.base import ExecResult, SandboxSpec, Session
from pace_agent.sandbox.room import Room
from pace_agent.sandbox.session import RoomSession

_TAKE_STDIN = """
import os
fd = os.open(".stdin", os.O_RDONLY)
os.dup2(fd, 0)
os.close(fd)
os.unlink(".stdin")
del os, fd
"""


async def run_in_session(session: Session, code: str, stdin: bytes, timeout: float | None) -> ExecResult:
    """The code as the first that a session runs, with a standard input."""
    if stdin:
        await session.put(".stdin", stdin)
        taken = await session.run_python(_TAKE_STDIN)
        if taken.exit_code != 0:
            raise SandboxError(f"standard input could not be given: {taken.stderr.strip()}")
    return await session.run_python(code, timeout=timeout)


class Zygotes:
    """Rooms that fork for each execution: at most one for each core, used one at a time, kept for the next one."""

    def __init__(self, start: Callable[[SandboxSpec], Awaitable[Room]], called: Callable[[ExecResult], None]) -> None:
        self._start = start
        self._called = called
        self._cores = asyncio.Semaphore(os.cpu_count() or 1)
        self._idle: list[RoomSession] = []
        """Those that nobody uses, the longest idle first."""
        self._all: set[RoomSession] = set()

    async def run(self, spec: SandboxSpec, code: str, stdin: bytes, timeout: float | None) -> ExecResult:
        async with self._cores, self._zygote(spec) as zygote:
            return await zygote.run_fresh(code, stdin=stdin, timeout=timeout)

    @asynccontextmanager
    async def _zygote(self, spec: SandboxSpec) -> AsyncIterator[RoomSession]:
        for dead in [zygote for zygote in self._idle if not zygote.alive]:
            self._idle.remove(dead)
            await dead.close()
        found = next((zygote for zygote in self._idle if zygote.spec == spec), None)
        if found is not None:
            self._idle.remove(found)
        else:
            if self._idle and len(self._all) >= (os.cpu_count() or 1):
                await self._idle.pop(0).close()  # one for other limits or modules makes room
            found = RoomSession(spec, await self._start(spec), self._start, self._all.discard, self._called)
            self._all.add(found)
        try:
            yield found
        finally:
            if not found.closed:  # as it is by a call that was cancelled
                self._idle.append(found)

    async def aclose(self) -> None:
        await asyncio.gather(*(zygote.close() for zygote in list(self._all)))
