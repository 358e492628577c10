"""One call while it is going on: what it has written, and what is left of its standard input."""

# ruff: noqa: SIM105 - contextlib is an import that every session would pay for
from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Header = dict[str, Any]

CHUNK = 1 << 16
FLOOD_FACTOR = 16
"""A call that writes this many times what is kept is interrupted."""
GRACE = 1.0
"""Seconds between an interrupt for a flood and the kill."""
NOTHING = b""
CANT_START = 126
"""Exit code of what could not be started, as shells have it."""


class Capture:
    """The head and the tail of a stream, at most `limit` bytes in all."""

    def __init__(self, limit: int) -> None:
        self.half = max(limit // 2, 1)
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        space = self.half - len(self.head)
        if space > 0:
            self.head += data[:space]
            data = data[space:]
        self.tail += data
        if len(self.tail) > 2 * self.half + CHUNK:
            del self.tail[: -self.half]

    @property
    def cut(self) -> int:
        """Bytes that are not kept."""
        return max(self.total - 2 * self.half, 0)

    def text(self) -> bytes:
        if not self.cut:
            return bytes(self.head + self.tail)
        return b"".join((self.head, b"\n[... %d bytes cut ...]\n" % self.cut, self.tail[-self.half :]))


class Call:
    """One run or exec while it is going on. Owns `given`, the near end of the process's standard input, or -1."""

    def __init__(self, number: int, group: int, out: int, err: int, captured: int) -> None:
        self.id = number
        self.group = group
        self.out = out
        self.err = err
        self.given = -1
        self.pending = memoryview(NOTHING)
        share = captured // 4
        self.captures = {out: Capture(captured - share), err: Capture(share)}
        self.flood_limit = FLOOD_FACTOR * captured
        self.flooded_at: float | None = None
        self.sweep = False
        """Whether everything that was started must be gone at the end."""
        self.killed = False
        self.is_cell = False
        self.must_repeat = False
        """An interrupt was ignored: by the kernel, which does so between cells, or by what the cell waits for."""

    def read(self, fd: int) -> int:
        """Take what is there: bytes read, 0 at the end of the stream, -1 if nothing is there yet."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return -1
        self.captures[fd].add(data)
        return len(data)

    def drain(self) -> None:
        """Take what the pipes hold now, without waiting for whoever keeps them open."""
        for fd in (self.out, self.err):
            for _ in range(64):  # a pipe holds no more; another writer must not keep us here
                if self.read(fd) < CHUNK:
                    break

    def feed(self) -> bool:
        """Write what fits of the standard input; whether some is left."""
        try:
            self.pending = self.pending[os.write(self.given, self.pending[:CHUNK]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self.pending = self.pending[:0]
        return len(self.pending) > 0

    def close(self) -> None:
        """The pipes that were opened for this call."""
        self.close_given()
        os.close(self.out)
        os.close(self.err)

    def close_given(self) -> None:
        if self.given >= 0:
            os.close(self.given)
            self.given = -1

    @property
    def written(self) -> int:
        return sum(capture.total for capture in self.captures.values())

    def interrupt(self) -> None:
        self.must_repeat = self.is_cell and ignores_interrupts(self.group)
        try:
            os.killpg(self.group, signal.SIGINT)
        except ProcessLookupError:
            pass

    def repeat_interrupt(self) -> None:
        """Once the kernel heeds interrupts."""
        if self.must_repeat and not ignores_interrupts(self.group):
            self.must_repeat = False
            try:
                os.kill(self.group, signal.SIGINT)
            except ProcessLookupError:
                pass

    def cant_start(self, error: OSError, far_ends: tuple[int, ...]) -> tuple[Any, ...]:
        """The reply where no process could be had for it."""
        for fd in far_ends:
            os.close(fd)
        self.captures[self.err].add(f"can't start a process: {os.strerror(error.errno or 0)}\n".encode())
        return self.result(None, {"exit_code": CANT_START}, lost=False)

    def result(self, status: int | None, report: Header, lost: bool) -> tuple[Any, ...]:
        """The reply: from the wait status of a process that ended, else from what it reported."""
        if status is None:
            reported = report.get("exit_code")
            exit_code, died_of = reported if type(reported) is int else 1, 0  # the code can write what it likes there
        else:
            exit_code = os.waitstatus_to_exitcode(status)
            died_of = max(-exit_code, 0)
        out, err = self.captures[self.out], self.captures[self.err]
        texts = out.text(), err.text()
        header = {
            "exit_code": exit_code,
            "signal": died_of,
            "oom": bool(report.get("oom")),
            "state_lost": lost,
            "cut": out.cut + err.cut,
            "out": len(texts[0]),
            "err": len(texts[1]),
        }
        return (header, *texts)


def ignores_interrupts(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as handle:
            for line in handle:
                if line.startswith(b"SigIgn:"):
                    return bool(int(line.split()[1], 16) & 1 << signal.SIGINT - 1)
    except OSError:
        pass  # it has ended
    return False


def piped(number: int, stdin: bytes, captured: int) -> tuple[Call, tuple[int, int, int]]:
    """A call with pipes of its own, and the ends for its process: standard input (empty if there is none), out, err."""
    out, far_out = os.pipe()
    err, far_err = os.pipe()
    far_given, given = os.pipe() if stdin else (os.open("/dev/null", os.O_RDONLY), -1)
    for fd in (out, err, given):
        if fd >= 0:
            os.set_blocking(fd, False)
    call = Call(number, -1, out, err, captured)
    call.given, call.pending = given, memoryview(stdin)
    return call, (far_given, far_out, far_err)
