"""Fresh executions: a process that has modules loaded forks for each, and the fork moves into namespaces of its own.

The zygote is a room as bubblewrap makes it (no host files, no network, another user), only without the filter and with
the right to make namespaces below its own, because it never runs the model's code. The fork that does has

* new namespaces of every kind: no process, socket, mount or shared memory of another execution is there;
* empty memory file systems at /box, /tmp and /dev/shm, with a bound on files as well as on bytes;
* no capability, the filter on system calls, and the limits of a session.

When its first process ends the kernel ends all that it left.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import sys

from pace_agent.sandbox.inside.calls import piped
from pace_agent.sandbox.inside.cells import new_main, open_streams, preload, run_cell
from pace_agent.sandbox.inside.confine import checked, drop_capabilities, install_filter, libc, set_dumpable
from pace_agent.sandbox.inside.frames import receive_report, send
from pace_agent.sandbox.inside.processes import become_child, first_to_die, limit
from pace_agent.sandbox.inside.supervisor import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Header = dict[str, Any]
    Reply = tuple[Any, ...]

FILTER = "/.pace/filter"
"""Where the program of the filter lies, as an array of `struct sock_filter`."""

_CLONE = {"x86_64": 56, "aarch64": 220}
_NEW_NAMESPACES = 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000
"""CLONE_NEW: cgroup, uts, ipc, user, pid, net and mount."""
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41


def fork_into_namespaces(machine: str) -> int:
    """As os.fork, with the child as the first process of namespaces of its own."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = libc.syscall(_CLONE[machine], _NEW_NAMESPACES | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return checked(pid, "new namespaces")


def write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, text)
    os.close(fd)


class Zygote(Supervisor):
    """A supervisor that knows no session: each execution starts from what was loaded, and leaves nothing."""

    def __init__(self, reader: int, writer: int, config: Header) -> None:
        super().__init__(reader, writer, config)
        self.limits: dict[str, int] = config["limits"]
        self.disk: int = config["disk"]
        self.files: int = config["files"]
        self.shown: list[str] = config["shown"]
        self.machine = os.uname().machine

    def begin(self) -> None:
        # Loaded once, here, and not in each fork.
        import fcntl  # noqa: F401
        import resource  # noqa: F401
        import socket  # noqa: F401

        with open(FILTER, "rb") as handle:
            self.program = handle.read()
        if error := preload(self.modules, self.root):
            raise SystemExit(error)
        import gc

        gc.freeze()  # a collection in a fork would copy every page that it looks at

    def op_fresh(self, header: Header, body: bytes) -> Reply:
        """Run the code that follows `stdin` bytes of standard input in the body."""
        size = header["stdin"]
        call, far_ends = piped(header["id"], body[:size], self.captured)
        reports, far_reports = os.pipe()
        try:
            call.group = pid = self.children.awaits(fork_into_namespaces(self.machine))
            if pid == 0:
                self.become_execution(body[size:], far_ends, far_reports)
            self.watch(call, pid, None, (*far_ends, far_reports))
            call.drain()
            report = receive_report(reports) or {}
            if "failed" in report:
                return {"failed": report["failed"]}, b""
            ended = None if "exit_code" in report else report.get("status", int(signal.SIGKILL))
            return call.result(ended, report, lost=False)
        except OSError as error:
            return call.cant_start(error, (*far_ends, far_reports))
        finally:
            call.close()
            os.close(reports)

    def become_execution(self, code: bytes, streams: tuple[int, int, int], reports: int) -> NoReturn:
        """The first process of the new namespaces: furnishes them, starts the one that runs the code, waits for it."""
        try:
            become_child(*streams)
            os.closerange(3, reports)
            os.closerange(reports + 1, 1024)
            self.furnish()
            set_dumpable(False)  # the code must not write to what we hold open
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            first, far = os.pipe()
            code_pid = os.fork()
            if code_pid == 0:
                os.close(reports)
                self.run(code, far)
            os.close(far)
            os.set_blocking(first, False)  # it may be held open by what the code has started
            status = None
            while status is None:
                done, ended = os.waitpid(-1, 0)
                status = ended if done == code_pid else None
            reported = receive_report(first) or {}  # the code can write what it likes there
            send(reports, {key: reported[key] for key in ("exit_code", "oom") if key in reported} | {"status": status})
        except BaseException as error:
            send(reports, {"failed": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(0)

    def furnish(self) -> None:
        for name, text in (("setgroups", b"deny"), ("uid_map", b"1000 1000 1"), ("gid_map", b"1000 1000 1")):
            write(f"/proc/self/{name}", text)
        mount = libc.mount
        checked(mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mounts of its own")
        checked(mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None), "/proc")
        # Modes of its folder and of ptmx would be remembered from one execution to the next.
        terminals = b"newinstance,ptmxmode=0666,mode=620"
        checked(mount(b"devpts", b"/dev/pts", b"devpts", _MS_NOSUID | _MS_NOEXEC, terminals), "/dev/pts")
        # What the room shows below a folder that is about to be covered.
        shown = [(os.fsencode(path), os.open(path, os.O_PATH)) for path in self.shown]
        for path, mode in ((b"/dev/shm", 1777), (b"/tmp", 1777), (b"/box", 755)):
            options = f"mode={mode},size={self.disk},nr_inodes={self.files}".encode()
            checked(mount(b"tmpfs", path, b"tmpfs", _MS_NOSUID | _MS_NODEV, options), path.decode())
        for path, fd in shown:
            os.makedirs(path, exist_ok=True)
            checked(mount(b"/proc/self/fd/%d" % fd, path, None, _MS_BIND | _MS_REC, None), path.decode())
            os.close(fd)
        os.chdir(self.root)
        self.start_loopback()
        drop_capabilities(self.machine)
        install_filter(self.program)
        limit(self.limits)

    @staticmethod
    def start_loopback() -> None:
        import fcntl
        import socket

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
            fcntl.ioctl(anything, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP_RUNNING))

    def run(self, code: bytes, reports: int) -> NoReturn:
        """The process that runs the code."""
        status = 70
        try:
            os.set_inheritable(reports, False)
            set_dumpable(True)
            first_to_die()
            open_streams()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            report = run_cell(code.decode("utf-8", "surrogatepass"), "<cell 1>", new_main())
            send(reports, report)
            status = report["exit_code"] & 0xFF
        finally:
            os._exit(status)


def start() -> None:
    """On a socket at descriptor 3, with the configuration as the last argument."""
    os.set_inheritable(3, False)
    Zygote(3, 3, json.loads(sys.argv[-1])).serve()
