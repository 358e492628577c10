"""Messages between an engine and its process: pickles with a length in front, over a socket pair.

Both ends belong to one program and one user; this is no protocol for strangers.
"""

import pickle
import struct
from typing import Any

HEADER = struct.Struct("!Q")


def encode(message: Any) -> bytes:
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(payload)) + payload


class Decoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that `data` completes."""
        buffer = self._buffer
        buffer += data
        messages = []
        while len(buffer) >= HEADER.size:
            (size,) = HEADER.unpack_from(buffer)
            end = HEADER.size + size
            if len(buffer) < end:
                break
            messages.append(pickle.loads(bytes(buffer[HEADER.size : end])))
            del buffer[:end]
        return messages
