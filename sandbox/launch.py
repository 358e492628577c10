"""The host's end of the launcher: starts it, asks it for rooms, hears when they are gone.

What always holds: every room that `spawn` returned gets its `gone` set exactly once, also when the launcher dies.
Belongs to the event loop in which it was started.
"""

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pace_agent.errors import SandboxError
from pace_agent.sandbox import bundle, launcher
from pace_agent.sandbox.room import RoomEnd

PATIENCE = 10.0
"""Seconds in which a launcher must answer, and end a room, before it is taken for dead."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to start the rooms of one kind."""

    argv: Sequence[str]
    files: Mapping[int, bytes]
    """Contents of the descriptors that `argv` refers to. Number 3 is taken: it is the room's socket."""
    environment: Mapping[str, str]
    """The whole environment. `{folder}` in a value is the room's own folder, with `plain`."""
    plain: bool
    """Without namespaces, as the same user, in a temporary folder of its own."""
    memory: int
    """Bytes over the whole room."""
    processes: int
    folders: tuple[int, int] | None = None
    """Bytes and files of each of the room's memory file systems; None where it makes its own."""


class LaunchedProcess:
    """A room, as the launcher sees it."""

    def __init__(self, launcher: "Launcher", number: int) -> None:
        self._launcher = launcher
        self._number = number
        self.gone: asyncio.Future[RoomEnd] = asyncio.get_running_loop().create_future()
        """Set when no process of the room is left; SandboxError if the launcher died."""
        self.memory_enforced = False

    def kill(self) -> None:
        """End every process of the room. Returns at once; `gone` tells when."""
        if not self.gone.done():
            self._launcher.send({"op": "kill", "id": self._number})
            overdue = asyncio.get_running_loop().call_later(PATIENCE, self._launcher.give_up)
            self.gone.add_done_callback(lambda _: overdue.cancel())

    async def oom_kills(self) -> int:
        """How many of its processes the kernel has killed for want of memory so far."""
        return await self._launcher.ask_oom(self._number)


class Launcher:
    def __init__(self, user: int | None, expose: Sequence[str]) -> None:
        self._user = user
        self._expose = list(expose)
        self._rooms: dict[int, LaunchedProcess] = {}
        self._templates: dict[int, int] = {}
        self._plans: list[Plan] = []
        self._questions: deque[asyncio.Future[int]] = deque()
        self._outgoing: deque[tuple[bytes, int | None]] = deque()
        self._next = 0
        self.alive = False
        self.makes_folders = False
        """Whether it may mount memory file systems for its rooms. Known after the start."""

    async def start(self) -> None:
        """SandboxError if it can't do its work here."""
        loop = asyncio.get_running_loop()
        self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            self._process = self._run(far.fileno())
        self._socket.setblocking(False)
        self._started: asyncio.Future[str | None] = loop.create_future()
        self._loop = loop
        self.alive = True
        loop.add_reader(self._socket, self._hear)
        try:
            error = await asyncio.wait_for(self._started, 30)
        except BaseException:
            await self.aclose()
            raise
        if error is not None:
            await self.aclose()
            raise SandboxError(f"the sandbox launcher did not start: {error}")

    def _run(self, control: int) -> subprocess.Popen[bytes]:
        program, writer = os.pipe()
        config = {"control": control, "owner": os.getpid(), "user": self._user, "expose": self._expose}
        code = bundle.compiled(launcher.__name__, launcher.ORDER, sys.executable)
        with open(program, "rb"), open(writer, "wb") as pipe:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", bundle.run_compiled(program), json.dumps(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[control, program],
                env={},
                cwd="/",
                start_new_session=True,
            )
            pipe.write(code)
        return process

    def spawn(self, plan: Plan, room_socket: socket.socket) -> LaunchedProcess:
        """Start a room at the other end of whose socket its agent will speak. Returns before it runs."""
        template = self._templates.get(id(plan))
        if template is None:
            template = self._templates[id(plan)] = len(self._plans)
            self._plans.append(plan)  # kept, so that its id stays its own
            files = {number: base64.b64encode(data).decode() for number, data in plan.files.items()}
            self.send(
                {
                    "op": "template",
                    "id": template,
                    "argv": list(plan.argv),
                    "files": files,
                    "environment": dict(plan.environment),
                    "plain": plan.plain,
                    "memory": plan.memory,
                    "processes": plan.processes,
                    "folders": plan.folders,
                }
            )
        if not self.alive:  # here, or it would be a room whose end nobody tells
            raise SandboxError("the sandbox launcher died")
        self._next += 1
        room = self._rooms[self._next] = LaunchedProcess(self, self._next)
        self.send({"op": "spawn", "id": self._next, "template": template}, os.dup(room_socket.fileno()))
        return room

    async def ask_oom(self, number: int) -> int:
        if not self.alive:
            return 0
        question: asyncio.Future[int] = self._loop.create_future()
        self._questions.append(question)
        self.send({"op": "oom", "id": number})
        overdue = self._loop.call_later(PATIENCE, self.give_up)
        try:
            return await question
        finally:
            overdue.cancel()

    def give_up(self) -> None:
        """It doesn't answer: end it, and by the kernel's hand every room."""
        if self.alive:
            self._process.kill()
            self._died()

    def send(self, message: dict[str, Any], fd: int | None = None) -> None:
        """Queue a message; `fd`, if given, goes with it and is closed here."""
        if not self.alive:
            if fd is not None:
                os.close(fd)
            return
        self._outgoing.append((json.dumps(message).encode(), fd))
        self._flush()

    def _flush(self) -> None:
        while self._outgoing:
            data, fd = self._outgoing[0]
            try:
                socket.send_fds(self._socket, [data], [] if fd is None else [fd])
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                return
            except OSError:
                self._died()
                return
            self._outgoing.popleft()
            if fd is not None:
                os.close(fd)
        self._loop.remove_writer(self._socket)

    def _hear(self) -> None:
        while self.alive:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._died()
                return
            self._heed(json.loads(data))

    def _heed(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "started":
                self.makes_folders = message.get("folders", False)
                self._started.set_result(message.get("error"))
            case "spawned":
                self._rooms[message["id"]].memory_enforced = message["memory_enforced"]
            case "gone":
                room = self._rooms.pop(message["id"])
                if not room.gone.done():
                    room.gone.set_result(RoomEnd(message["status"], message["errors"], message["oom"]))
            case "oom":
                question = self._questions.popleft()
                if not question.done():
                    question.set_result(message["count"])

    def _died(self) -> None:
        """The launcher is gone, and with it, by the kernel's hand, every room."""
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for _, fd in self._outgoing:
            if fd is not None:
                os.close(fd)
        self._outgoing.clear()
        if not self._started.done():
            self._started.set_result("it ended at once")
        for room in self._rooms.values():
            if not room.gone.done():
                room.gone.set_exception(SandboxError("the sandbox launcher died"))
                room.gone.exception()  # marked as seen: not every room has someone waiting for its end
        self._rooms.clear()
        for question in self._questions:
            if not question.done():
                question.set_result(0)

    async def aclose(self) -> None:
        """End every room and the launcher, and wait until they are gone."""
        self._died()
        await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # its rooms die with it
            self._process.kill()
            self._process.wait()
