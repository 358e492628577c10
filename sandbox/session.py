"""A rollout's sandbox as the host sees it: deadlines, typed results, one end.

What always holds:

* The deadline is the host's. At the deadline the code is interrupted, a second later everything that it started is
  killed, and if the agent doesn't answer to that, the whole room goes.
* A call that is cancelled takes its room with it: the session is closed and nothing survives.
* Code that destroys its own room gets a result that says so (`sandbox_died`, or `oom`), and the next call finds a fresh
  room without its state and files. So a model can't turn its own doing into an infrastructure failure.
* A session is closed once, by whoever comes first.
"""

import asyncio
import contextlib
import errno
import time
from collections.abc import Awaitable, Callable
from typing import Any

from pace_agent.errors import SandboxError, UserError
from pace_agent.sandbox.base import ExecResult, Outcome, SandboxSpec, file_error
from pace_agent.sandbox.room import Header, Room, RoomDied

GRACE = 1.0
"""Seconds between the interrupt and the kill."""
AGENT_GRACE = 3.0
"""Seconds that the agent has to kill and answer before the room goes."""
_SIGKILL, _SIGXCPU = 9, 24


class Deadline:
    """Escalates in three steps from `seconds` on. `passed` tells whether it began to."""

    def __init__(self, room: Room, number: int, seconds: float) -> None:
        self._room = room
        self._number = number
        self._loop = asyncio.get_running_loop()
        self.passed = False
        self._timer = self._loop.call_later(seconds, self._interrupt)

    def _interrupt(self) -> None:
        self.passed = True
        self._room.tell({"op": "interrupt", "id": self._number, "sweep": True})
        self._timer = self._loop.call_later(GRACE, self._kill)

    def _kill(self) -> None:
        self._room.tell({"op": "kill", "id": self._number})
        self._timer = self._loop.call_later(AGENT_GRACE, self._room.kill)

    def cancel(self) -> None:
        self._timer.cancel()


class RoomSession:
    """A `Session` in a `Room`. `start` opens another room with the same limits; `ended` hears of the end once."""

    def __init__(
        self,
        spec: SandboxSpec,
        room: Room,
        start: Callable[[SandboxSpec], Awaitable[Room]],
        ended: Callable[["RoomSession"], None],
        called: Callable[[ExecResult], None],
    ) -> None:
        self.spec = spec
        self._room: Room | None = room
        self._start = start
        self._ended = ended
        self._called = called
        self._lock = asyncio.Lock()
        self._oom_seen = 0
        self._lost = False
        """Whether state was lost that no result has reported."""
        self._running: int | None = None
        self._closed = False
        self._gone: asyncio.Future[None] | None = None

    # -- what a Session does

    async def run_python(self, code: str, *, timeout: float | None = None) -> ExecResult:
        _insist("code", code, str)
        return await self._call({"op": "run"}, code.encode("utf-8", "surrogatepass"), timeout)

    async def run_fresh(self, code: str, *, stdin: bytes = b"", timeout: float | None = None) -> ExecResult:
        """In a room for fresh executions: one that shares nothing with those before."""
        _insist("code", code, str)
        _insist("stdin", stdin, bytes)
        body = stdin + code.encode("utf-8", "surrogatepass")
        return await self._call({"op": "fresh", "stdin": len(stdin)}, body, timeout)

    async def exec(self, argv: list[str], *, stdin: bytes = b"", timeout: float | None = None) -> ExecResult:
        _insist("stdin", stdin, bytes)
        if (
            not isinstance(argv, list | tuple)
            or not argv
            or not all(isinstance(word, str) and "\0" not in word for word in argv)
        ):
            raise UserError(f"argv must be a list of strings without NUL, at least the program's name; got {argv!r}")
        return await self._call({"op": "exec", "argv": argv}, stdin, timeout)

    async def put(self, path: str, data: bytes) -> None:
        _insist("data", data, bytes)
        if len(data) > self.spec.disk:
            raise file_error(errno.ENOSPC, path)
        header, _ = await self._ask({"op": "put", "path": path}, data)
        _raise_errno(header, path)

    async def get(self, path: str, *, limit: int = 1 << 20) -> bytes:
        header, body = await self._ask({"op": "get", "path": path, "limit": limit}, largest=limit)
        _raise_errno(header, path)
        if header.get("too_large"):
            raise SandboxError(f"{path} is larger than {limit} bytes")
        return body

    async def interrupt(self) -> None:
        if self._room is not None and self._running is not None:
            self._room.tell({"op": "interrupt", "id": self._running, "sweep": False})

    async def reset(self) -> None:
        """Forget the Python state and end every process that was started; files stay."""
        await self._ask({"op": "reset"})

    async def close(self) -> None:
        self.close_now()
        if self._gone is not None:
            await asyncio.shield(self._gone)

    # -- how

    @property
    def closed(self) -> bool:
        """Whether its end has begun."""
        return self._closed

    @property
    def alive(self) -> bool:
        """Whether its room is there; another one takes its place at the next call."""
        return self._room is not None and self._room.alive

    def close_now(self) -> None:
        """Kill without waiting: for cancellation, where nothing may be awaited."""
        if self._closed:
            return
        self._closed = True
        self._gone = asyncio.ensure_future(self._finish(self._room))
        if self._room is not None:
            self._room.kill()

    async def _finish(self, room: Room | None) -> None:
        try:
            if room is not None:
                await room.end()
        except SandboxError:
            pass  # the launcher died, and every room with it
        finally:
            self._ended(self)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("this sandbox session is closed (a cancelled call closes it too)")

    async def _live_room(self) -> Room:
        self._check_open()
        if self._room is not None and not self._room.alive:
            dead, self._room, self._lost = self._room, None, True
            with contextlib.suppress(SandboxError):  # its launcher died, and it with that
                await dead.end()
        if self._room is None:
            room = await self._start(self.spec)
            try:
                self._check_open()  # it may have been closed meanwhile
            except SandboxError:
                await room.end()
                raise
            self._room, self._oom_seen = room, 0
        return self._room

    async def _call(self, header: Header, body: bytes, timeout: float | None) -> ExecResult:
        seconds = self.spec.timeout if timeout is None else timeout
        if not seconds > 0:
            raise UserError(f"timeout must be above 0 seconds, got {timeout}")
        async with self._lock:
            room = await self._live_room()
            if header["op"] == "fresh":  # what was killed in those before says nothing about this one
                self._oom_seen = await room.process.oom_kills()
            began = time.monotonic()
            self._running = room.begin(header, body, largest=self.spec.captured)
            deadline = Deadline(room, self._running, seconds)
            try:
                reply, output = await room.reply()
                if header["op"] == "fresh" and "failed" in reply:
                    raise SandboxError(f"a fresh room could not be furnished: {reply['failed']}")
                result = await self._result(room, reply, output, deadline.passed, time.monotonic() - began)
            except RoomDied:
                result = await self._death(room, deadline.passed, time.monotonic() - began)
            except asyncio.CancelledError:
                self.close_now()
                raise
            finally:
                self._running = None
                deadline.cancel()
        self._called(result)
        return result

    async def _ask(self, header: Header, body: bytes = b"", *, largest: int = 0) -> tuple[Header, bytes]:
        """A request that runs none of the model's code. SandboxError if the room dies or doesn't answer."""
        async with self._lock:
            room = await self._live_room()
            room.begin(header, body, largest=largest)
            timer = asyncio.get_running_loop().call_later(self.spec.timeout + AGENT_GRACE, room.kill)
            try:
                return await room.reply()
            except RoomDied:
                raise SandboxError(f"the sandbox ended during {header['op']}") from None
            except asyncio.CancelledError:
                self.close_now()
                raise
            finally:
                timer.cancel()

    async def _result(self, room: Room, reply: Header, output: bytes, late: bool, seconds: float) -> ExecResult:
        exit_code, died_of, cut = (_integer(reply, key) for key in ("exit_code", "signal", "cut"))
        out_size = _integer(reply, "out")
        outcome = Outcome.OK if exit_code == 0 else Outcome.NONZERO
        note = ""
        if late:
            outcome, note = Outcome.TIMEOUT, f"Stopped at the deadline after {seconds:.1f} s."
        elif reply.get("oom") is True or (
            (died_of == _SIGKILL or exit_code == 128 + _SIGKILL) and await self._more_oom(room)
        ):
            outcome = Outcome.OOM
        elif died_of == _SIGXCPU:
            outcome, note = Outcome.TIMEOUT, f"Stopped after {self.spec.cpu_seconds} s of processor time."
        elif cut > 0:
            outcome = Outcome.OUTPUT_LIMIT
        elif died_of:
            outcome = Outcome.KILLED
        lost, self._lost = self._lost, False
        errors = output[out_size:].decode("utf-8", "replace")
        return ExecResult(
            outcome=outcome,
            stdout=output[:out_size].decode("utf-8", "replace"),
            stderr=_with_note(errors, note),
            exit_code=exit_code,
            seconds=seconds,
            truncated=cut > 0,
            state_lost=lost or reply.get("state_lost") is True,
            memory_enforced=room.process.memory_enforced,
        )

    async def _more_oom(self, room: Room) -> bool:
        count = await room.process.oom_kills()
        more = count > self._oom_seen
        self._oom_seen = count
        return more

    async def _death(self, room: Room, late: bool, seconds: float) -> ExecResult:
        """The room ended under a call. SandboxError and no result if the launcher did: no model's code can do that."""
        self._check_open()
        self._room, self._lost = None, True
        end = await room.end()
        self._lost = False
        if late:
            outcome, note = Outcome.TIMEOUT, f"Stopped at the deadline after {seconds:.1f} s, with the whole sandbox."
        elif end.oom_kills > self._oom_seen:
            outcome, note = Outcome.OOM, "The sandbox ran out of memory and ended."
        else:
            outcome, note = Outcome.SANDBOX_DIED, "The sandbox ended. State and files are lost."
        return ExecResult(
            outcome=outcome,
            stderr=note + "\n",
            seconds=seconds,
            state_lost=True,
            memory_enforced=room.process.memory_enforced,
        )


def _integer(reply: Header, key: str) -> int:
    """A number from the agent: within 32 bits, 0 where it isn't one."""
    value: Any = reply.get(key, 0)
    return max(min(value, 2**31 - 1), -(2**31)) if type(value) is int else 0


def _with_note(text: str, note: str) -> str:
    if not note:
        return text
    return f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{note}\n"


def _insist(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise UserError(f"{name} must be {kind.__name__}, got {type(value).__name__}")


def _raise_errno(reply: Header, path: str) -> None:
    if number := _integer(reply, "errno"):
        raise file_error(number, path)
