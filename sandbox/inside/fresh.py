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
import os
import signal
import struct

from pace_agent.sandbox.inside.calls import piped
from pace_agent.sandbox.inside.cells import new_main, open_streams, preload, run_cell
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
_CAPSET = {"x86_64": 126, "aarch64": 91}
_NEW_NAMESPACES = 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000
"""CLONE_NEW: cgroup, uts, ipc, user, pid, net and mount."""
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 4, 24, 38, 22, 2
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41

_libc = ctypes.PyDLL(None, use_errno=True)
"""Without letting go of the interpreter: it may not be in between when it is forked."""


def checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def fork_into_namespaces(machine: str) -> int:
    """As os.fork, with the child as the first process of namespaces of its own."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = _libc.syscall(_CLONE[machine], _NEW_NAMESPACES | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return checked(pid, "new namespaces")


class Zygote(Supervisor):
    """A supervisor that knows no session: each execution starts from what was loaded, and leaves nothing."""

    def __init__(self, reader: int, writer: int, config: Header) -> None:
        super().__init__(reader, writer, config)
        self.limits: dict[str, int] = config["limits"]
        self.disk: int = config["disk"]
        self.files: int = config["files"]
        self.machine = os.uname().machine

    def begin(self) -> None:
        import socket  # noqa: F401 - loaded once, here

        with open(FILTER, "rb") as handle:
            program = handle.read()
        self.program = ctypes.create_string_buffer(program, len(program))
        self.filter = struct.pack("HP", len(program) // 8, ctypes.addressof(self.program))
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
            _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the code must not write to what we hold open
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
            send(reports, {**(receive_report(first) or {}), "status": status})
        except BaseException as error:
            send(reports, {"failed": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(0)

    def furnish(self) -> None:
        for name, text in (("setgroups", "deny"), ("uid_map", "1000 1000 1"), ("gid_map", "1000 1000 1")):
            with open(f"/proc/self/{name}", "w") as handle:
                handle.write(text)
        mount = _libc.mount
        checked(mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mounts of its own")
        checked(mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None), "/proc")
        for path, mode in ((b"/dev/shm", 1777), (b"/tmp", 1777), (b"/box", 755)):
            options = f"mode={mode},size={self.disk},nr_inodes={self.files}".encode()
            checked(mount(b"tmpfs", path, b"tmpfs", _MS_NOSUID | _MS_NODEV, options), path.decode())
        os.chdir(self.root)
        self.start_loopback()
        for capability in range(64):
            if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                break  # the kernel knows no more
        header = struct.pack("Ii", 0x20080522, 0)
        checked(_libc.syscall(_CAPSET[self.machine], header, bytes(24)), "capset")
        checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, self.filter, 0, 0), "the filter on system calls")
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
            _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
            first_to_die()
            open_streams()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            report = run_cell(code.decode("utf-8", "surrogatepass"), "<cell 1>", new_main())
            send(reports, report)
            status = report["exit_code"] & 0xFF
        finally:
            os._exit(status)
