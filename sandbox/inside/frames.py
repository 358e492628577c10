"""Frames on a pair of descriptors: to the host, and to the kernel."""

from __future__ import annotations

import json
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Header = dict[str, Any]

HEADER = struct.Struct("!II")


def send(fd: int, header: Header, *bodies: bytes) -> None:
    text = json.dumps(header).encode() if header else b""
    data = b"".join((HEADER.pack(len(text), sum(map(len, bodies))), text, *bodies))
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def receive_exactly(fd: int, size: int) -> bytes | None:
    """`size` bytes, or None at the end of the stream."""
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def receive(fd: int) -> tuple[Header, bytes] | None:
    """(header, body), or None at the end of the stream."""
    sizes = receive_exactly(fd, HEADER.size)
    if sizes is None:
        return None
    header_size, body_size = HEADER.unpack(sizes)
    data = receive_exactly(fd, header_size + body_size)
    if data is None:
        return None
    return json.loads(data[:header_size]) if header_size else {}, data[header_size:]


def receive_report(link: int) -> Header | None:
    """The header of a kernel's frame; None if it has ended or wrote what is no frame."""
    try:
        frame = receive(link)
    except (ValueError, RecursionError, MemoryError, OSError):
        return None
    return frame[0] if frame is not None and isinstance(frame[0], dict) else None
