"""One running sandbox: the frames that go to its agent and come back. Nothing that comes back is trusted.

What always holds:

* One request at a time; its reply, or `RoomDied`, comes exactly once.
* What the agent may send is bounded before it is sent. A room that sends more, or what is no frame, is killed.
"""

import asyncio
import json
import struct
from dataclasses import dataclass
from typing import Any, Protocol

from pace_agent.errors import SandboxError

Header = dict[str, Any]

LONGEST_END = 15.0
_SIZES = struct.Struct("!II")
_LARGEST_HEADER = 1 << 16
_CHUNK = 1 << 14
"""Bytes that are read at once."""
_SLACK = 4096
"""Bytes beyond the limits: the markers where output was cut."""


@dataclass(frozen=True, slots=True)
class RoomEnd:
    """How a room's first process ended."""

    status: int
    errors: str
    oom_kills: int


class RoomProcess(Protocol):
    """What a room runs in, seen from here."""

    @property
    def gone(self) -> asyncio.Future[RoomEnd]:
        """Set when no process of the room is left; SandboxError if nobody knows any more."""

    @property
    def memory_enforced(self) -> bool: ...

    def kill(self) -> None:
        """End every process of the room. Returns at once; `gone` tells when."""

    async def oom_kills(self) -> int:
        """How many of its processes were killed for want of memory so far."""


class RoomDied(Exception):
    """The room ended while a request was waiting."""


class Room(asyncio.BufferedProtocol):
    def __init__(self, process: RoomProcess) -> None:
        loop = asyncio.get_running_loop()
        self.process = process
        process.gone.add_done_callback(lambda _: self._abort())
        self.ready: asyncio.Future[Header] = loop.create_future()
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._chunk = bytearray(_CHUNK)
        self._buffer = bytearray()
        self._largest = _SLACK
        self._waiting: asyncio.Future[tuple[Header, bytes]] | None = None
        self._waiting_id = 0
        self.alive = True

    # -- requests

    def begin(self, header: Header, body: bytes = b"", *, largest: int = 0) -> int:
        """Send a request whose reply may carry `largest` bytes; returns its id. `reply` waits for the answer."""
        self._waiting_id += 1
        self._waiting = self._loop.create_future()
        self._largest = largest + _SLACK
        if self.alive:
            self.tell({**header, "id": self._waiting_id}, body)
        else:
            self._fail()
        return self._waiting_id

    async def reply(self) -> tuple[Header, bytes]:
        assert self._waiting is not None
        try:
            return await self._waiting
        finally:
            self._waiting = None

    def tell(self, header: Header, body: bytes = b"") -> None:
        """Send a frame without waiting for anything."""
        text = json.dumps(header).encode()
        self.write(b"".join((_SIZES.pack(len(text), len(body)), text, body)))

    def write(self, data: bytes) -> None:
        if self._transport is not None and self.alive:
            self._transport.write(data)

    def kill(self) -> None:
        """End every process of the room, at once and without its help."""
        self.process.kill()
        self._abort()

    async def end(self) -> RoomEnd:
        """Kill it, and wait until nothing of it is left, or nobody says so. SandboxError if the launcher died."""
        self.kill()
        try:
            return await asyncio.wait_for(asyncio.shield(self.process.gone), LONGEST_END)
        except TimeoutError:
            return RoomEnd(-1, f"it did not end in {LONGEST_END:.0f} s", 0)

    def _abort(self) -> None:
        self.alive = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.BufferedProtocol, which spares a large allocation for each read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self.alive:
            transport.abort()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._chunk

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(memoryview(self._chunk)[:nbytes]))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _SIZES.size:
            header_size, body_size = _SIZES.unpack_from(self._buffer)
            if header_size > _LARGEST_HEADER or body_size > self._largest:
                self.kill()
                return
            end = _SIZES.size + header_size + body_size
            if len(self._buffer) < end:
                return
            try:
                header = json.loads(self._buffer[_SIZES.size : _SIZES.size + header_size])
            except (ValueError, RecursionError):
                self.kill()
                return
            body = bytes(self._buffer[_SIZES.size + header_size : end])
            del self._buffer[:end]
            self._deliver(header, body)

    def _deliver(self, header: Any, body: bytes) -> None:
        if not isinstance(header, dict):
            self.kill()
        elif not self.ready.done():
            self.ready.set_result(header)
        elif self._waiting is not None and not self._waiting.done() and header.get("id") == self._waiting_id:
            self._waiting.set_result((header, body))
        else:
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        self._buffer.clear()
        self._fail()

    def _fail(self) -> None:
        if not self.ready.done():
            self.ready.set_exception(SandboxError("the sandbox ended before it was ready"))
            self.ready.exception()  # marked as seen: the start may have been cancelled
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(RoomDied())
            self._waiting.exception()
