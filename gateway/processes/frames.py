"""The binary messages between the server and processes that it has started.

Each is a head of nine bytes (length of the payload, kind, number of the call it belongs to; little
endian) and its payload. What a payload holds, its kind says.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

HEAD = struct.Struct("<IBI")
LENGTH = struct.Struct("<I")


class Kind:
    """What a frame says, in every channel; what else there is, each channel's own kinds say.

    "Headed" payloads are JSON, its length before it, and bytes behind it.
    """

    DATA = 0  # a piece of what a call carries
    END = 1  # no more DATA
    GONE = 2  # nothing more is wanted
    TAKEN = 3  # so many bytes of DATA have been passed on: a number
    PING = 4  # to a process that the server has started
    PONG = 5  # what it answers
    ABORT = 6  # the sender has ended the call in its middle; neither END nor GONE follows


OWN_KINDS = 16
"""From here on kinds are each channel's own."""

NO_CALL = 0
"""The number of no call: what the processes say to each other."""


def call_numbers() -> Iterator[int]:
    """Every number but the one that is no call's; when they come again the first have ended."""
    while True:
        yield from range(1, 1 << 32)


class Frame(NamedTuple):
    """One message."""

    kind: int
    call: int
    payload: bytes


def packed(kind: int, call: int, payload: bytes = b"") -> bytes:
    """A frame as bytes."""
    return HEAD.pack(len(payload), kind, call) + payload


def headed(head: object, rest: bytes = b"") -> bytes:
    """The payload of JSON and bytes behind it."""
    text = orjson.dumps(head)
    return b"%b%b%b" % (LENGTH.pack(len(text)), text, rest)


def read_headed(payload: bytes) -> tuple[Any, bytes]:
    """The JSON and the bytes of such a payload."""
    end = LENGTH.size + LENGTH.unpack_from(payload)[0]
    return orjson.loads(payload[LENGTH.size : end]), payload[end:]


def number(value: int) -> bytes:
    """The payload of a number."""
    return LENGTH.pack(value)


def read_number(payload: bytes) -> int:
    """The number in such a payload."""
    found: int = LENGTH.unpack(payload)[0]
    return found


class FrameReader:
    """Takes bytes as they come, and gives the frames that are whole."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that end in `data`; all of them must be taken."""
        if self._held:
            self._held += data
            data = bytes(self._held) if self._is_whole() else b""
            if not data:
                return
            self._held.clear()
        start, size = 0, len(data)
        while size - start >= HEAD.size:
            length, kind, call = HEAD.unpack_from(data, start)
            end = start + HEAD.size + length
            if end > size:
                break
            yield Frame(kind, call, data[start + HEAD.size : end])
            start = end
        if start < size:
            self._held += memoryview(data)[start:]

    def _is_whole(self) -> bool:
        """Whether the first frame of what is held has all come."""
        if len(self._held) < HEAD.size:
            return False
        length: int = HEAD.unpack_from(self._held)[0]
        return len(self._held) >= HEAD.size + length
