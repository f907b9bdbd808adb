"""The binary messages between the server and its frontend processes.

Each is a head of nine bytes (length of the payload, kind, number of the call it belongs to; little
endian) and its payload. What a payload holds, its kind says.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import orjson

HEAD = struct.Struct("<IBI")
LENGTH = struct.Struct("<I")


class Kind(IntEnum):
    """What a frame says. "Headed" payloads are JSON, its length before it, and bytes behind it."""

    SETTINGS = 0  # headed; to a frontend, first of all
    HTTP_CALL = 1  # headed: the request's head, and the first piece of its body
    GRPC_CALL = 2  # headed: path and metadata, and the message if only one comes
    DATA = 3  # a piece of a body, a message of gRPC
    HEAD = 4  # headed: the answer's head, initial metadata
    WHOLE = 5  # headed: an HTTP answer with status 200, and its body
    END = 6  # no more DATA; of an answer of gRPC headed: status, details, trailing metadata
    GONE = 7  # the client has left
    ABORT = 8  # drop the client
    TAKEN = 9  # so many bytes of DATA have been passed on: a number
    STOP_HTTP = 10  # accept nothing more, and drop all in so many milliseconds: a number
    DROP_HALF = 11  # drop those of whose request only a part has come
    STOP_GRPC = 12  # take no more RPCs
    CUT_OFF = 13  # drop all RPCs in so many milliseconds: a number
    WANTED = 14  # the rest of a request's body is wanted
    PING = 15  # to a frontend
    PONG = 16  # what it answers
    LOG = 17  # headed: how to log from now on


SERVER = 0
"""The number of no call: what the processes say to each other."""


class Frame(NamedTuple):
    """One message."""

    kind: int
    call: int
    payload: bytes


def packed(kind: Kind, call: int, payload: bytes = b"") -> bytes:
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
