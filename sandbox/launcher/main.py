"""The loop of the launcher: templates, rooms, their ends."""

import base64
import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import Any

from pace_agent.sandbox.launcher.cgroups import Cgroups, read, write
from pace_agent.sandbox.launcher.memory import Watch
from pace_agent.sandbox.launcher.mounts import become_mounter, expose, make_folders

ROOM_FD = 3
"""Where a child finds the socket to its owner."""
_FIRST_PRIVATE_FD = 64
"""This process keeps its own descriptors from here on, so that low numbers are free for children."""
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _private_fd(fd: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_PRIVATE_FD)
    os.close(fd)
    return moved


def spare_the_host() -> None:
    """Where the machine runs out of memory, rooms go first. What root set, nothing inside can undo."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as handle:
        handle.write("900")


class Template:
    """What the rooms of one kind have in common: the command and the contents of its extra descriptors."""

    def __init__(self, message: dict[str, Any], contents: dict[str, int]) -> None:
        self.argv: list[str] = message["argv"]
        self.plain: bool = message["plain"]
        """Without namespaces: runs as this user, in a new temporary folder that is removed afterwards."""
        self.memory: int = message["memory"]
        self.processes: int = message["processes"]
        self.folders: list[int] | None = message["folders"]
        """Bytes and files of each memory file system that is made for a room; None where none is."""
        self.environment: dict[str, str] = message["environment"]
        self.files = {int(number): _file_of(data, contents) for number, data in message["files"].items()}


def _file_of(data: str, contents: dict[str, int]) -> int:
    """A descriptor of a file with these contents, in base64; one for all that have the same."""
    if data not in contents:
        fd = os.memfd_create("room", os.MFD_CLOEXEC)
        with open(fd, "wb", closefd=False) as handle:
            handle.write(base64.b64decode(data))
        contents[data] = _private_fd(fd)
    return contents[data]


class Room:
    def __init__(self, pid: int, errors: int, cgroups: list[str], folder: str | None, memory: int) -> None:
        self.pid = pid
        self.watch = None if cgroups else Watch(pid, memory)
        self.errors = errors
        self.cgroups = cgroups
        self.folder = folder
        self.status: int | None = None


class Launcher:
    def __init__(self, control: socket.socket, owner: int, user: int | None, mounts: bool) -> None:
        self.control = control
        self.owner = owner
        self.user = user
        self.templates: dict[int, Template] = {}
        self.contents: dict[str, int] = {}
        self.rooms: dict[int, Room] = {}
        self.mounts = mounts
        self.cgroups = Cgroups()
        self.wake, wake_writer = os.pipe()
        self.wake, wake_writer = _private_fd(self.wake), _private_fd(wake_writer)
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_writer, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def tell(self, **message: Any) -> None:
        # If the owner is gone the loop is about to see it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.control.send(json.dumps(message).encode())

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        self.tell(op="started", memory_enforced=bool(self.cgroups.bases), folders=self.mounts)
        try:
            while os.getppid() == self.owner:
                ready = {fd for fd, _ in poll.poll(self._patience())}
                if self.wake in ready:
                    os.read(self.wake, 4096)
                if self.control.fileno() in ready and not self._serve_one():
                    return
                self._reap()
                now = time.monotonic()
                for watch in self._watches():
                    watch.look(now)
        finally:
            self._end()

    def _watches(self) -> list[Watch]:
        return [room.watch for room in self.rooms.values() if room.watch is not None and room.status is None]

    def _patience(self) -> int:
        """Milliseconds until something is due."""
        if any(room.status is not None for room in self.rooms.values()):
            return 5
        due = min((watch.due for watch in self._watches()), default=time.monotonic() + 1)
        return min(max(int((due - time.monotonic()) * 1000), 0) + 1, 1000)

    def _kills(self, room: Room) -> int:
        """Processes of the room that were killed for want of memory."""
        return room.watch.kills if room.watch is not None else self.cgroups.oom_kills(room.cgroups)

    def _serve_one(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self.control, 1 << 20, 1)
        except ConnectionResetError:
            return False
        if not data:
            return False
        message = json.loads(data)
        match message["op"]:
            case "template":
                self.templates[message["id"]] = Template(message, self.contents)
            case "spawn":
                self._spawn(message["id"], self.templates[message["template"]], _private_fd(fds[0]))
            case "kill":
                if (room := self.rooms.get(message["id"])) is not None and room.status is None:
                    os.kill(room.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
            case "oom":
                room = self.rooms.get(message["id"])
                self.tell(op="oom", id=message["id"], count=self._kills(room) if room else 0)
        return True

    def _spawn(self, number: int, template: Template, room_fd: int) -> None:
        folder: str | None = None
        cgroups: list[str] = []
        pipe: tuple[int, ...] = ()
        try:
            folder = tempfile.mkdtemp(prefix="pace-agent-") if template.plain else None
            cgroups = self.cgroups.create(str(number), template.memory, template.processes)
            reader, writer = pipe = tuple(map(_private_fd, os.pipe()))
            os.set_blocking(reader, False)
            pid = os.fork()
        except OSError as error:
            for fd in (*pipe, room_fd):
                os.close(fd)
            Cgroups.remove(cgroups)
            if folder is not None:
                os.rmdir(folder)
            self.tell(op="gone", id=number, status=-1, errors=f"it can't be started: {error}", oom=0)
            return
        if pid == 0:
            self._become(template, cgroups, room_fd, writer, folder)
        os.close(writer)
        os.close(room_fd)
        self.rooms[number] = Room(pid, reader, cgroups, folder, template.memory)
        self.tell(op="spawned", id=number, memory_enforced=bool(cgroups))

    def _become(self, template: Template, cgroups: list[str], room_fd: int, errors: int, folder: str | None) -> None:
        """The child: never returns."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            spare_the_host()
            for group in cgroups:
                # In version 1, moving itself as one thread spares the lock over all processes, which takes 10 ms.
                write(f"{group}/tasks" if os.path.exists(f"{group}/tasks") else f"{group}/cgroup.procs", "0")
            nothing = _private_fd(os.open("/dev/null", os.O_RDWR))
            os.dup2(nothing, 0)
            os.dup2(nothing, 1)
            os.dup2(errors, 2)
            os.dup2(room_fd, ROOM_FD)
            for target, source in template.files.items():
                # Opened anew: a duplicate would share its position with every other room's.
                os.dup2(_private_fd(os.open(f"/proc/self/fd/{source}", os.O_RDONLY)), target)
            if folder is not None:
                os.chdir(folder)
            if template.folders is not None:
                make_folders(os.geteuid() if self.user is None else self.user, *template.folders)
            if self.user is not None and not template.plain:
                os.setgroups([])
                os.setresgid(self.user, self.user, self.user)
                os.setresuid(self.user, self.user, self.user)
            environment = {key: value.replace("{folder}", folder or "/") for key, value in template.environment.items()}
            # Inside, the first process's command line can be read: it names no path of ours.
            name = template.argv[0] if template.plain else os.path.basename(template.argv[0])
            os.execve(template.argv[0], [name, *template.argv[1:]], environment)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(127)

    def _reap(self) -> None:
        by_pid = {room.pid: room for room in self.rooms.values() if room.status is None}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in by_pid:
                by_pid.pop(pid).status = os.waitstatus_to_exitcode(status)
        orphans = self._children() - by_pid.keys()
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        if not orphans:
            for number in [number for number, room in self.rooms.items() if room.status is not None]:
                self._forget(number)

    @staticmethod
    def _children() -> set[int]:
        try:
            return {int(pid) for pid in read(f"/proc/self/task/{os.getpid()}/children").split()}
        except FileNotFoundError:  # a kernel built without it; rooms then end by their parent-death signal alone
            return set()

    def _forget(self, number: int) -> None:
        room = self.rooms[number]
        kills = self._kills(room)
        if not Cgroups.remove(room.cgroups):
            return  # its last process is not quite gone; the next round tries again
        del self.rooms[number]
        if room.folder is not None:
            shutil.rmtree(room.folder, ignore_errors=True)
        try:
            errors = os.read(room.errors, 4096).decode(errors="replace")
        except BlockingIOError:
            errors = ""
        os.close(room.errors)
        self.tell(op="gone", id=number, status=room.status, errors=errors, oom=kills)

    def _end(self) -> None:
        for room in self.rooms.values():
            if room.status is None:
                os.kill(room.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while self.rooms and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.002)
        self.cgroups.close()


def main(text: str) -> None:
    """Serve the owner that `text` names, as JSON."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # whatever the owner blocks
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # rooms have limits of their own
    config = json.loads(text)
    control = socket.socket(fileno=_private_fd(config["control"]))
    user: int | None = config["user"]
    try:
        if user is not None:
            expose(config["expose"], user)
    except OSError as error:
        control.send(json.dumps({"op": "started", "error": str(error)}).encode())
        return
    Launcher(control, config["owner"], user, become_mounter()).serve()


def start() -> None:
    main(sys.argv[-1])
