"""A session: a kernel that keeps its names from call to call, and programs beside it."""

# ruff: noqa: SIM105 - contextlib is an import that every session would pay for
from __future__ import annotations

import functools
import json
import os
import signal
import sys

from pace_agent.sandbox.inside.calls import NOTHING, Call, piped
from pace_agent.sandbox.inside.cells import kernel_main
from pace_agent.sandbox.inside.confine import set_dumpable
from pace_agent.sandbox.inside.frames import receive_report, send
from pace_agent.sandbox.inside.processes import become_child, become_reaper, first_to_die, in_child, limit
from pace_agent.sandbox.inside.supervisor import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from pace_agent.sandbox.inside.supervisor import Header, Reply


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


class Session(Supervisor):
    """The supervisor of a session: a kernel that keeps its names, and programs beside it."""

    def begin(self) -> None:
        self.kernel = self.new_kernel()
        if self.modules:
            self.wait_until_loaded()

    def new_kernel(self) -> Kernel:
        ours = (self.reader, self.writer, self.wake, self.wake_writer)
        kernel = Kernel(ours, self.root, self.modules)
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
        call.is_cell = True
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
        self.children.reap()  # what has ended still counts against the limit on processes
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


def serve(reader: int, writer: int, config: Header, kind: type[Session] = Session) -> None:
    """Serve the host at these descriptors until it is gone."""
    if not config["namespaced"]:
        become_reaper()
    # The code must not write to our memory, and so in our name, by way of /proc.
    set_dumpable(False)
    in_child.append(functools.partial(set_dumpable, True))
    limit(config["limits"])
    kind(reader, writer, config).serve()


def start() -> None:
    """On a socket at descriptor 3, with the configuration as the last argument."""
    os.set_inheritable(3, False)
    serve(3, 3, json.loads(sys.argv[-1]))
