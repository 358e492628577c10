"""Rooms that are containers. The agent is the first process of each, on the one stream that we attach.

What always holds:

* A container ends when its owner does: its standard input closes with our connection, and its first process leaves,
  which takes every other along. What a daemon missed is removed by the next start of an owner, or ends by itself
  after a day.
* A deadline that the agent doesn't keep is kept from outside: the daemon kills the container.
"""

import asyncio
import struct
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from pace_agent.errors import SandboxError
from pace_agent.sandbox.base import BackendCheck, SandboxSpec
from pace_agent.sandbox.docker import image as images
from pace_agent.sandbox.docker import owner
from pace_agent.sandbox.docker.daemon import Daemon, NotHere, attach
from pace_agent.sandbox.docker.options import USER, creation, first_message
from pace_agent.sandbox.room import Room, RoomEnd
from pace_agent.sandbox.trial import first_program

T = TypeVar("T")

_FRAME = struct.Struct("!BxxxI")
"""Before each piece of the attached stream: which stream it is of, and its size."""
_ERRORS = 2
_MOST_ERRORS = 4096


@dataclass(frozen=True, slots=True)
class Docker:
    """The backend. `image` needs a `python3` of 3.9 or later; without one an image of this machine's Python is built.

    `runtime` is one that the daemon knows, `runsc` for gVisor; None for its default.
    """

    image: str | None = None
    runtime: str | None = None
    name: str = "docker"
    user: int = USER
    has_zygote: bool = False

    def rooms(self) -> "DockerRooms":
        return DockerRooms(self)


class Container:
    """The process of a room, as `Room` sees it."""

    def __init__(self, rooms: "DockerRooms", number: str, memory_enforced: bool) -> None:
        self._rooms = rooms
        self._killed = False
        self.id = number
        self.errors = b""
        self.gone: asyncio.Future[RoomEnd] = asyncio.get_running_loop().create_future()
        self.memory_enforced = memory_enforced

    def kill(self) -> None:
        """Remove the container. Returns at once; `gone` tells when."""
        if not self._killed:
            self._killed = True
            self._rooms.remove(self)

    def removed(self, removing: "asyncio.Task[None]") -> None:
        error = asyncio.CancelledError() if removing.cancelled() else removing.exception()
        if error is None:
            self.gone.set_result(RoomEnd(-1, self.errors.decode(errors="replace"), 0))
        else:
            self.gone.set_exception(SandboxError(f"container {self.id[:12]} could not be removed: {error}"))
            self.gone.exception()  # marked as seen: not every room has someone waiting for its end

    async def oom_kills(self) -> int:
        return 0  # the agent counts them itself, in the container's control group


class ContainerRoom(Room):
    """A `Room` on an attached stream, where standard output and errors come in turns."""

    def __init__(self, process: Container) -> None:
        super().__init__(process)
        self._container = process
        self._pieces = bytearray()

    def data_received(self, data: bytes) -> None:
        self._pieces += data
        while len(self._pieces) >= _FRAME.size:
            stream, size = _FRAME.unpack_from(self._pieces)
            end = _FRAME.size + size
            if len(self._pieces) < end:
                return
            piece = bytes(self._pieces[_FRAME.size : end])
            del self._pieces[:end]
            if stream == _ERRORS:
                self._container.errors = (self._container.errors + piece)[:_MOST_ERRORS]
            else:
                super().data_received(piece)


class DockerRooms:
    """`Rooms` of one daemon and image."""

    def __init__(self, backend: Docker) -> None:
        self._backend = backend
        self._daemon: Daemon | None = None
        self._image = ""
        self._memory_enforced = False
        self._lock = asyncio.Lock()
        self._open: set[Container] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> None:
        await self._ready()

    async def open(self, spec: SandboxSpec, *, fresh: bool) -> Room:
        opening = self._keep(self._open_one(spec))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:  # it may come to be all the same
            opening.add_done_callback(_unwanted)
            raise

    async def _open_one(self, spec: SandboxSpec) -> Room:
        daemon = await self._ready()
        options = creation(self._image, spec, self._backend.runtime)
        made = await daemon.call(lambda: str(daemon.client.containers.create(**options).id))
        container = Container(self, made, self._memory_enforced)
        self._open.add(container)
        room = ContainerRoom(container)
        try:
            if self._closed:
                raise SandboxError("the sandbox provider is closed")
            near = await daemon.call(lambda: attach(daemon.client, container.id))
            near.setblocking(False)
            try:
                await asyncio.get_running_loop().create_connection(lambda: room, sock=near)
            except BaseException:
                near.close()
                raise
            await daemon.call(lambda: daemon.client.api.start(container.id))
        except BaseException:
            room.kill()
            raise
        room.write(first_message(spec))
        return room

    def remove(self, container: Container) -> None:
        """Without waiting; the container hears when it is gone."""
        assert self._daemon is not None
        daemon = self._daemon
        self._open.discard(container)
        removing = self._keep(daemon.call(lambda: owner.remove(daemon.client, container.id)))
        removing.add_done_callback(container.removed)

    def _keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that `aclose` waits for."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _ready(self) -> Daemon:
        async with self._lock:
            if self._closed:
                raise SandboxError("the sandbox provider is closed")
            if self._daemon is None:
                daemon = await asyncio.to_thread(Daemon)
                try:
                    info = await daemon.call(daemon.client.info)
                    await daemon.call(lambda: owner.sweep(daemon.client))
                    self._image = await daemon.call(lambda: images.ready(daemon.client, self._backend.image))
                except BaseException:
                    await asyncio.to_thread(daemon.close)
                    raise
                self._memory_enforced = bool(info.get("MemoryLimit"))
                self._daemon = daemon
            return self._daemon

    async def aclose(self) -> None:
        self._closed = True
        while self._open or self._tasks:
            for container in list(self._open):
                container.kill()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._daemon is not None:
            await asyncio.to_thread(self._daemon.close)
            self._daemon = None


def _unwanted(opening: asyncio.Task[Room]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().kill()


def check(backend: Docker) -> BackendCheck:
    """Build or find the image, start a container, run a line in it, remove it."""
    try:
        return BackendCheck("docker", True, first_program(backend))
    except NotHere as error:
        return BackendCheck("docker", False, str(error), error.remedy)
    except (SandboxError, OSError) as error:
        return BackendCheck("docker", False, str(error))
