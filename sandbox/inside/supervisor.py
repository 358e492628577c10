"""The supervisor: takes requests from the host, one after the other, and never runs a line of the model's."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import time

from pace_agent.sandbox.inside.calls import GRACE, NOTHING, Call
from pace_agent.sandbox.inside.files import open_below
from pace_agent.sandbox.inside.frames import receive, receive_report, send
from pace_agent.sandbox.inside.processes import Children, sweep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Header = dict[str, Any]
    Reply = tuple[Any, ...]
    """A header, and the bodies that follow it."""

REPEAT = 2
"""Milliseconds until an interrupt that was ignored is tried again."""


def number_of(error: BaseException) -> int:
    """What the system would call it; a ValueError is for a name that no file can have."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    return errno.ENOMEM if isinstance(error, MemoryError) else errno.EINVAL


class Supervisor:
    """What every room has: the link to the host, the deadlines' work, files, programs, fresh processes."""

    def __init__(self, reader: int, writer: int, config: Header) -> None:
        self.reader = reader
        self.writer = writer
        self.root: str = config["root"] or os.getcwd()
        self.captured: int = config["captured"]
        self.namespaced: bool = config["namespaced"]
        if self.namespaced and os.getpid() != 1 and os.readlink("/proc/self/ns/pid") == config["outside"]:
            # We are about to signal every process that we see.
            raise SystemExit("refusing to run: this is the host's own process namespace")
        self.modules: list[str] = config["modules"]
        self.children = Children()
        self.wake, self.wake_writer = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self.wake_writer, False)
        signal.set_wakeup_fd(self.wake_writer, warn_on_full_buffer=False)
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
        try:
            while (frame := receive(self.reader)) is not None:
                header, body = frame
                if header["op"] in ("interrupt", "kill"):
                    continue  # for a call that has ended
                reply, *bodies = getattr(self, "op_" + header["op"])(header, body)
                send(self.writer, {"id": header["id"], **reply}, *bodies)
        except ConnectionError:
            pass  # the host went while it was being answered
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
        except (OSError, ValueError) as error:
            return {"errno": number_of(error)}, NOTHING
        return {}, NOTHING

    def op_get(self, header: Header, body: bytes) -> Reply:
        try:
            with open(open_below(self.root, header["path"], os.O_RDONLY), "rb") as handle:
                data = handle.read(header["limit"] + 1)
        except (OSError, ValueError, MemoryError) as error:
            return {"errno": number_of(error)}, NOTHING
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
        for fd in (self.reader, self.wake, call.out, call.err):
            poll.register(fd, select.POLLIN)
        if reports is not None:
            poll.register(reports, select.POLLIN)
        if call.given >= 0:
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
        """Milliseconds until something is due, for an early interrupt or a flood; None where nothing is."""
        call.repeat_interrupt()
        if call.flooded_at is None:
            if call.written <= call.flood_limit:
                return REPEAT if call.must_repeat else None
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
