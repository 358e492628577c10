"""The small process that starts and ends sandboxes. Standalone: run by path, imports nothing of this package.

Why a process of its own: a trainer is large and has many threads, so forking from it is slow and unsafe; the signal
that a child gets when its parent dies follows the parent's *thread*; and privileges can be dropped here, between
fork and exec, where no other thread runs.

What always holds:

* It ends when its owner does (end of file on the control socket, or the owner's process is gone), and nothing that it
  started outlives it: it kills and reaps first; and if it is killed itself, each sandbox dies with its parent.
* A child runs with an empty environment, with exactly the descriptors of its template, and, when this process is
  root, as an unprivileged user.
* Its own children are monitors of rooms. Any other child was orphaned by a dead room and is killed. A room is
  reported `gone` when its monitor is reaped and no such orphan is left.

One JSON message per packet on a SEQPACKET socket. In: template, spawn (with one descriptor), kill, oom.
Out: started, spawned, gone, oom.
"""

import base64
import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import Any

ROOM_FD = 3
"""Where a child finds the socket to its owner."""
_FIRST_PRIVATE_FD = 64
"""This process keeps its own descriptors from here on, so that low numbers are free for children."""
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _private_fd(fd: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_PRIVATE_FD)
    os.close(fd)
    return moved


def _blocked_ancestor(path: str, user: int) -> str | None:
    """The topmost folder above `path` that `user` (with no group of ours) may not search."""
    parts = os.path.abspath(path).split("/")
    for end in range(2, len(parts)):
        folder = "/".join(parts[:end])
        state = os.stat(folder)
        bit = 0o100 if state.st_uid == user else 0o001
        if not state.st_mode & bit:
            return folder
    return None


def expose(paths: list[str], user: int) -> None:
    """Make folders reachable for `user` where a closed folder (a 0700 home, for one) stands above them.

    In a mount namespace of our own the closed folder is covered by an empty one in which only `paths` stand, at
    their old names. Nothing changes for anyone else, and what was closed stays closed.
    """
    blocked = {path: _blocked_ancestor(path, user) for path in paths}
    covers = sorted({cover for cover in blocked.values() if cover})
    if not covers:
        return
    _checked(_libc.unshare(_CLONE_NEWNS), "unshare")
    _checked(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "make mounts private")
    # Opened after unshare: a mount of another namespace can't be bound.
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path, cover in blocked.items() if cover}
    os.umask(0o022)
    for cover in covers:
        _checked(_libc.mount(b"tmpfs", os.fsencode(cover), b"tmpfs", 6, b"mode=0755,size=64k"), f"cover {cover}")
    # Outer folders first, so that a path inside another one is not covered by it.
    for path in sorted(sources, key=len):
        if not os.path.lexists(path):
            os.makedirs(path)
            # The descriptor reaches the folder behind the cover.
            _checked(
                _libc.mount(b"/proc/self/fd/%d" % sources[path], os.fsencode(path), None, _MS_BIND | _MS_REC, None),
                f"bind {path}",
            )
        os.close(sources[path])


class Cgroups:
    """A memory and process limit over a whole room, where this process may create cgroups; else nothing.

    Version 2 is tried first, below the root and beside our own cgroup, then version 1.
    """

    def __init__(self) -> None:
        self.bases: list[str] = []
        self.version = 0
        for build in (self._build_v2, self._build_v1):
            try:
                self.bases = build()
            except OSError:
                self.close()
                continue
            self.version = 2 if build == self._build_v2 else 1
            break

    @staticmethod
    def _own(controller: str) -> str:
        with open("/proc/self/cgroup", encoding="utf-8") as lines:
            for line in lines:
                _, names, path = line.rstrip("\n").split(":", 2)
                if controller in names.split(","):
                    return path
        return "/"

    def _make(self, base: str) -> str:
        base = base.rstrip("/")
        for name in os.listdir(base):
            prefix, _, pid = name.rpartition("-")
            if prefix == "pace-agent" and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                # A launcher that was killed left it; its rooms died with it.
                stale = f"{base}/{name}"
                self.remove([f.path for f in os.scandir(stale) if f.is_dir()] + [stale])
        path = f"{base}/pace-agent-{os.getpid()}"
        os.mkdir(path)
        self.bases.append(path)
        return path

    def _build_v2(self) -> list[str]:
        root = "/sys/fs/cgroup"
        beside = os.path.dirname(self._own("").rstrip("/") or "/")
        for base in (root, root + beside):
            try:
                with open(f"{base}/cgroup.subtree_control", encoding="ascii") as handle:
                    if "memory" not in handle.read().split():
                        continue
                made = self._make(base)
                _write(f"{made}/cgroup.subtree_control", "+memory +pids")
            except OSError:
                self.close()
                continue
            return [made]
        raise OSError("no cgroup v2 with a memory controller may be changed by us")

    def _build_v1(self) -> list[str]:
        made = []
        for controller in ("memory", "pids"):
            root = f"/sys/fs/cgroup/{controller}"
            if not os.path.exists(f"{root}/cgroup.procs"):
                if controller == "memory":
                    raise OSError("no cgroup v1 memory controller")
                continue
            own = root + self._own(controller)
            made.append(self._make(own if os.path.isdir(own) else root))
        return made

    def create(self, name: str, memory: int, processes: int) -> list[str]:
        """Folders of one room, limits set and read back; [] where no limit holds."""
        folders: list[str] = []
        try:
            for base in self.bases:
                folder = f"{base}/{name}"
                os.mkdir(folder)
                folders.append(folder)
            limit = f"{folders[0]}/{'memory.max' if self.version == 2 else 'memory.limit_in_bytes'}"
            _write(limit, str(memory))
            swap = f"{folders[0]}/{'memory.swap.max' if self.version == 2 else 'memory.memsw.limit_in_bytes'}"
            if os.path.exists(swap):
                _write(swap, "0" if self.version == 2 else str(memory))
            if os.path.exists(f"{folders[-1]}/pids.max"):
                _write(f"{folders[-1]}/pids.max", str(processes))
            if int(_read(limit)) > memory:
                raise OSError("memory limit did not hold")
        except (OSError, IndexError, ValueError):
            self.remove(folders)
            return []
        return folders

    def oom_kills(self, folders: list[str]) -> int:
        if not folders:
            return 0
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        try:
            for line in _read(f"{folders[0]}/{name}").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
        except OSError:
            pass
        return 0

    @staticmethod
    def remove(folders: list[str]) -> bool:
        """Remove what can be removed; whether all of it is gone."""
        for folder in list(folders):
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            folders.remove(folder)
        return not folders

    def close(self) -> None:
        self.remove(self.bases)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as handle:
        handle.write(text)


def _read(path: str) -> str:
    with open(path, encoding="ascii") as handle:
        return handle.read()


class Template:
    """What the rooms of one kind have in common: the command and the contents of its extra descriptors."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.argv: list[str] = message["argv"]
        self.plain: bool = message["plain"]
        """Without namespaces: runs as this user, in a new temporary folder that is removed afterwards."""
        self.memory: int = message["memory"]
        self.processes: int = message["processes"]
        self.environment: dict[str, str] = message["environment"]
        self.files: dict[int, int] = {}
        for number, data in message["files"].items():
            fd = os.memfd_create("room", os.MFD_CLOEXEC)
            with open(fd, "wb", closefd=False) as handle:
                handle.write(base64.b64decode(data))
            self.files[int(number)] = _private_fd(fd)


class Room:
    def __init__(self, pid: int, errors: int, cgroups: list[str], folder: str | None) -> None:
        self.pid = pid
        self.errors = errors
        self.cgroups = cgroups
        self.folder = folder
        self.status: int | None = None


class Launcher:
    def __init__(self, control: socket.socket, owner: int, user: int | None) -> None:
        self.control = control
        self.owner = owner
        self.user = user
        self.templates: dict[int, Template] = {}
        self.rooms: dict[int, Room] = {}
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
        self.tell(op="started", memory_enforced=bool(self.cgroups.bases))
        try:
            while os.getppid() == self.owner:
                ending = any(room.status is not None for room in self.rooms.values())
                ready = {fd for fd, _ in poll.poll(5 if ending else 1000)}
                if self.wake in ready:
                    os.read(self.wake, 4096)
                if self.control.fileno() in ready and not self._serve_one():
                    return
                self._reap()
        finally:
            self._end()

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
                self.templates[message["id"]] = Template(message)
            case "spawn":
                self._spawn(message["id"], self.templates[message["template"]], _private_fd(fds[0]))
            case "kill":
                if (room := self.rooms.get(message["id"])) is not None and room.status is None:
                    os.kill(room.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
            case "oom":
                room = self.rooms.get(message["id"])
                self.tell(op="oom", id=message["id"], count=self.cgroups.oom_kills(room.cgroups) if room else 0)
        return True

    def _spawn(self, number: int, template: Template, room_fd: int) -> None:
        folder = tempfile.mkdtemp(prefix="pace-agent-") if template.plain else None
        cgroups = self.cgroups.create(str(number), template.memory, template.processes)
        reader, writer = os.pipe()
        reader, writer = _private_fd(reader), _private_fd(writer)
        os.set_blocking(reader, False)
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reader)
            os.close(writer)
            os.close(room_fd)
            Cgroups.remove(cgroups)
            self.tell(op="gone", id=number, status=-1, errors=f"fork: {error}", oom=0)
            return
        if pid == 0:
            self._become(template, cgroups, room_fd, writer, folder)
        os.close(writer)
        os.close(room_fd)
        self.rooms[number] = Room(pid, reader, cgroups, folder)
        self.tell(op="spawned", id=number, memory_enforced=bool(cgroups))

    def _become(self, template: Template, cgroups: list[str], room_fd: int, errors: int, folder: str | None) -> None:
        """The child: never returns."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            for group in cgroups:
                _write(f"{group}/cgroup.procs", "0")
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
            return {int(pid) for pid in _read(f"/proc/self/task/{os.getpid()}/children").split()}
        except FileNotFoundError:  # a kernel built without it; rooms then end by their parent-death signal alone
            return set()

    def _forget(self, number: int) -> None:
        room = self.rooms[number]
        kills = self.cgroups.oom_kills(room.cgroups)
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


def main() -> None:
    config = json.loads(sys.argv[1])
    control = socket.socket(fileno=_private_fd(config["control"]))
    user: int | None = config["user"]
    try:
        if user is not None:
            expose(config["expose"], user)
    except OSError as error:
        control.send(json.dumps({"op": "started", "error": str(error)}).encode())
        return
    Launcher(control, config["owner"], user).serve()


if __name__ == "__main__":
    main()
