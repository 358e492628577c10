"""Rooms that are processes of this machine, started by the launcher: bubblewrap's, and those without any walls."""

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import Any, Protocol

from pace_agent.errors import SandboxError
from pace_agent.sandbox.base import SandboxSpec
from pace_agent.sandbox.launch import Launcher, Plan
from pace_agent.sandbox.room import Room

OWN_PROCESSES = 1
"""The supervisor: `SandboxSpec.processes` counts the kernel and what it starts."""


class Kind(Protocol):
    """What the launcher has to know of a kind of room."""

    @property
    def name(self) -> str: ...

    @property
    def user(self) -> int | None:
        """Unprivileged user id to become; None to stay who we are."""

    @property
    def expose(self) -> tuple[str, ...]:
        """Folders that this user must be able to reach."""

    def plan(self, spec: SandboxSpec, *, fresh: bool, makes_folders: bool) -> Plan:
        """How to start a room: a session's, or one for `fresh` executions. `makes_folders`: the launcher can."""


def agent_config(
    spec: SandboxSpec, *, root: str, namespaced: bool, own_user: bool, shown: Sequence[str] = ()
) -> dict[str, Any]:
    """What the program inside keeps to; it goes there as JSON.

    `own_user`: no process outside counts as this user's. `shown`: folders below those that are covered for each fresh
    execution, to be shown in it again.
    """
    limits = {
        "DATA": spec.memory,
        "AS": 4 * spec.memory,
        "CPU": spec.cpu_seconds,
        "FSIZE": spec.disk,
        "NOFILE": spec.descriptors,
        "CORE": 0,
        "MEMLOCK": 1 << 16,
        "MSGQUEUE": 0,
        "SIGPENDING": 1024,  # timers too: outside, all processes of a user share these
    }
    if own_user:  # elsewhere it would count every process that the user has
        limits["NPROC"] = spec.processes + OWN_PROCESSES
    return {
        "root": root,
        "captured": spec.captured,
        "namespaced": namespaced,
        "outside": os.readlink("/proc/self/ns/pid"),
        "limits": limits,
        "modules": list(spec.modules),
        "disk": spec.disk,
        "files": spec.files,
        "shown": list(shown),
    }


class LaunchedRooms:
    """`Rooms` of one kind. One launcher serves them all; one that died is replaced at the next start."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._launcher: Launcher | None = None
        self._lock = asyncio.Lock()
        self._plans: dict[tuple[SandboxSpec, bool], Plan] = {}
        self._closed = False

    async def start(self) -> None:
        await self._ready_launcher()

    async def open(self, spec: SandboxSpec, *, fresh: bool) -> Room:
        launcher = await self._ready_launcher()
        plan = self._plans.get((spec, fresh))
        if plan is None:
            plan = self._kind.plan(spec, fresh=fresh, makes_folders=launcher.makes_folders)
            self._plans[spec, fresh] = plan
        near, far = socket.socketpair()
        try:
            with far:
                room = Room(launcher.spawn(plan, far))
        except BaseException:
            near.close()
            raise
        try:
            await asyncio.get_running_loop().create_connection(lambda: room, sock=near)
        except BaseException:
            near.close()
            room.kill()
            raise
        return room

    async def aclose(self) -> None:
        self._closed = True
        if self._launcher is not None:
            await self._launcher.aclose()

    async def _ready_launcher(self) -> Launcher:
        async with self._lock:
            if self._closed:
                raise SandboxError("the sandbox provider is closed")
            if self._launcher is None or not self._launcher.alive:
                dead, self._launcher = self._launcher, None
                if dead is not None:
                    await dead.aclose()
                launcher = Launcher(self._kind.user, self._kind.expose)
                await launcher.start()
                self._launcher = launcher
            return self._launcher
