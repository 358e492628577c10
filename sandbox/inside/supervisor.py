"""The supervisor: takes requests from the host, one after the other, and never runs a line of the model's."""

# ruff: noqa: SIM105 - contextlib is an import that every session would pay for
from __future__ import annotations

import errno
import os
import select
import signal
import sys
import time

from pace_agent.sandbox.inside.calls import GRACE, NOTHING, Call, piped
from pace_agent.sandbox.inside.cells import kernel_main
from pace_agent.sandbox.inside.files import open_below
from pace_agent.sandbox.inside.frames import receive, receive_report, send
from pace_agent.sandbox.inside.processes import Children, become_child, first_to_die, sweep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Header = dict[str, Any]
    Reply = tuple[Any, ...]
    """A header, and the bodies that follow it."""


class Kernel:
    """The process that runs cells, seen from the supervisor."""

    def __init__(self, keep_from: tuple[int, ...], root: str, modules: list[str]) -> None:
        far_requests, self.requests = os.pipe()
        self.reports, far_reports = os.pipe()
        self.out, far_out = os.pipe()
        self.err, far_err = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                become_child(0, far_out, far_err)
                for fd in {*keep_from, self.requests, self.reports, self.out, self.err, far_out, far_err}:
                    os.close(fd)
                kernel_main(far_requests, far_reports, root, modules)
            except BaseException as error:
                os.write(2, f"kernel: {error!r}\n".encode())
            finally:
                os._exit(70)
        for fd in (far_requests, far_reports, far_out, far_err):
            os.close(fd)
        for fd in (self.out, self.err):
            os.set_blocking(fd, False)

    def close(self) -> None:
        for fd in (self.requests, self.reports, self.out, self.err):
            os.close(fd)


class Supervisor:
    """What every room has: the link to the host, the deadlines' work, files, programs, fresh processes."""

    def __init__(self, reader: int, writer: int, config: Header) -> None:
        self.reader = reader
        self.writer = writer
        self.root: str = config["root"] or os.getcwd()
        self.captured: int = config["captured"]
        self.namespaced: bool = config["namespaced"]
        self.modules: list[str] = config["modules"]
        self.children = Children()
        self.wake, wake_writer = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.chdir(self.root)

    def begin(self) -> None:
        """Start what has to run before the host is told that we are ready. SystemExit with the reason otherwise."""

    def kept(self) -> set[int]:
        """Processes that outlive a call."""
        return set()

    def serve(self) -> None:
        self.begin()
        send(self.writer, {"op": "ready", "python": sys.version.split()[0]})
        nothing = os.open("/dev/null", os.O_RDWR)
        os.dup2(nothing, 2)  # until here it told the host why a start failed
        os.close(nothing)
        while (frame := receive(self.reader)) is not None:
            header, body = frame
            if header["op"] in ("interrupt", "kill"):
                continue  # for a call that has ended
            reply, *bodies = getattr(self, "op_" + header["op"])(header, body)
            send(self.writer, {"id": header["id"], **reply}, *bodies)
        self.leave()

    def leave(self) -> NoReturn:
        """The host has gone: take everything along, and without a namespace the folder too."""
        self.sweep(keep=set())
        if not self.namespaced and os.path.basename(self.root).startswith("pace-agent-"):
            import shutil

            shutil.rmtree(self.root, ignore_errors=True)
        os._exit(0)

    # -- files

    def op_put(self, header: Header, body: bytes) -> Reply:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with open(open_below(self.root, header["path"], flags, make_folders=True), "wb") as handle:
                handle.write(body)
        except OSError as error:
            return {"errno": error.errno or errno.EIO}, NOTHING
        return {}, NOTHING

    def op_get(self, header: Header, body: bytes) -> Reply:
        try:
            with open(open_below(self.root, header["path"], os.O_RDONLY), "rb") as handle:
                data = handle.read(header["limit"] + 1)
        except OSError as error:
            return {"errno": error.errno or errno.EIO}, NOTHING
        if len(data) > header["limit"]:
            return {"too_large": True}, NOTHING
        return {"size": len(data)}, data

    # -- what a call goes through

    def watch(
        self, call: Call, pid: int, reports: int | None, far_ends: tuple[int, ...] = ()
    ) -> tuple[int | None, Header]:
        """Serve a call until its process ended (its wait status) or, for the kernel, reported (None and the report)."""
        for fd in far_ends:
            os.close(fd)
        poll = select.poll()
        for fd in (call.out, call.err):
            os.set_blocking(fd, False)
        for fd in (self.reader, self.wake, call.out, call.err):
            poll.register(fd, select.POLLIN)
        if reports is not None:
            poll.register(reports, select.POLLIN)
        if call.given >= 0:
            os.set_blocking(call.given, False)
            poll.register(call.given, select.POLLOUT)
        while not call.killed:
            for fd, _ in poll.poll(self.next_check(call)):
                if fd == self.reader:
                    self.heed(call)
                elif fd == reports:
                    report = receive_report(fd)
                    if report is None:
                        poll.unregister(fd)
                    elif report.get("op") == "loaded":
                        pass  # a kernel that took the place of another; what it can't load, the code will meet
                    elif report.get("op") == "began":
                        call.began = True
                        if call.interrupted:
                            call.interrupt()
                    else:
                        call.drain()
                        return None, report
                elif fd == self.wake:
                    os.read(fd, 4096)
                    status = self.children.status(pid)
                    if status is not None:
                        return status, {}
                elif fd == call.given:
                    if not call.feed():
                        poll.unregister(fd)
                        call.close_given()
                elif call.read(fd) == 0:
                    poll.unregister(fd)
        return self.children.status(pid, wait=True), {}

    def next_check(self, call: Call) -> int | None:
        """Milliseconds until something is due because of a flood; None where nothing is."""
        if call.flooded_at is None:
            if call.written <= call.flood_limit:
                return None
            call.flooded_at = time.monotonic()
            call.sweep = True
            call.interrupt()
        left = call.flooded_at + GRACE - time.monotonic()
        if left <= 0:
            self.kill(call)
        return max(int(left * 1000), 0) + 1

    def heed(self, call: Call) -> None:
        """A frame from the host while a call is going on."""
        frame = receive(self.reader)
        if frame is None:
            self.leave()
        header, _ = frame
        if header["id"] == call.id and header["op"] == "interrupt":
            call.sweep = call.sweep or header["sweep"]
            call.interrupt()
        elif header["id"] == call.id and header["op"] == "kill":
            self.kill(call)

    def kill(self, call: Call) -> None:
        """End the call's process and all else that was started; the kernel only if it is what runs."""
        if not call.killed:
            call.killed = True
            self.sweep(keep=self.kept() - {call.group})

    def sweep(self, keep: set[int]) -> None:
        if not sweep(namespaced=self.namespaced, keep=keep):
            os._exit(71)  # give up the whole sandbox if some won't go


class Session(Supervisor):
    """The supervisor of a session: a kernel that keeps its names, and programs beside it."""

    def begin(self) -> None:
        self.kernel = self.new_kernel()
        if self.modules:
            self.wait_until_loaded()

    def new_kernel(self) -> Kernel:
        kernel = Kernel((self.reader, self.writer), self.root, self.modules)
        self.children.awaits(kernel.pid)
        return kernel

    def wait_until_loaded(self) -> None:
        report = receive_report(self.kernel.reports)
        if report is None or report.get("error"):
            raise SystemExit(report["error"] if report else "the kernel ended while it loaded modules")

    def kept(self) -> set[int]:
        return {self.kernel.pid}

    def replace_kernel(self) -> None:
        self.kernel.close()
        self.kernel = self.new_kernel()

    def op_run(self, header: Header, body: bytes) -> Reply:
        lost = self.children.status(self.kernel.pid) is not None
        if lost:  # it ended between calls
            self.replace_kernel()
        kernel = self.kernel
        call = Call(header["id"], kernel.pid, kernel.out, kernel.err, self.captured)
        call.began = False
        try:
            send(kernel.requests, {}, body)
        except BrokenPipeError:
            pass  # it is dying, and the loop is about to see that
        status, report = self.watch(call, kernel.pid, kernel.reports)
        if status is not None:
            call.drain()
            self.replace_kernel()
        if call.sweep:
            self.sweep(keep={self.kernel.pid})
        return call.result(status, report, lost or status is not None)

    def op_exec(self, header: Header, body: bytes) -> Reply:
        call, far_ends = piped(header["id"], body, self.captured)
        try:
            call.group = pid = self.children.awaits(os.fork())
            if pid == 0:
                self.become_program(header["argv"], *far_ends)
            status, _ = self.watch(call, pid, None, far_ends)
            call.drain()
            if call.sweep:
                self.sweep(keep={self.kernel.pid})
            return call.result(status, {}, lost=False)
        except BlockingIOError as error:  # the limit on processes
            return call.cant_start(error, far_ends)
        finally:
            call.close()

    def become_program(self, argv: list[str], stdin: int, stdout: int, stderr: int) -> NoReturn:
        try:
            become_child(stdin, stdout, stderr)
            for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            first_to_die()
            os.chdir(self.root)
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(2, f"{argv[0]}: {os.strerror(error.errno or 0)}\n".encode(errors="replace"))
        except BaseException as error:
            os.write(2, f"{error}\n".encode(errors="replace"))
        finally:
            os._exit(127)

    def op_reset(self, header: Header, body: bytes) -> Reply:
        self.sweep(keep=set())
        self.children.status(self.kernel.pid, wait=True)
        self.replace_kernel()
        return {}, NOTHING
