"""Messages between the gateway and a worker: both ends use this module.

A frame is a prefix (two little-endian integers: the sizes of what follows), a header (JSON) and a
body (the bytes of tensors, one after the other). A header is a list that begins with the kind of
message; `messages.py` says what follows.
"""

import struct
from collections.abc import Iterator, Sequence

PREFIX = struct.Struct("<IQ")
MAX_HEADER_BYTES = 64 << 20
MAX_BODY_BYTES = 1 << 34
RECEIVE_BYTES = 1 << 18
"""How much an end should ask the socket for at once."""


class BrokenFrame(Exception):
    """What came from the other end is not a frame; nothing after it can be understood."""


def frame(header: bytes, buffers: Sequence[memoryview | bytes] = ()) -> bytes:
    """A whole frame as bytes."""
    size = sum([len(each) for each in buffers])
    return b"".join((PREFIX.pack(len(header), size), header, *buffers))


class FrameReader:
    """Cuts what comes from a socket into frames. Bodies are views of what was fed."""

    __slots__ = ("_needed", "_parts", "_size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._needed = PREFIX.size

    def feed(self, data: bytes) -> Iterator[tuple[bytes, memoryview]]:
        """The frames that are whole now, as header and body; BrokenFrame if one cannot be."""
        self._parts.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return
        if len(self._parts) > 1:
            data = b"".join(self._parts)
        yield from self._cut(memoryview(data))

    def _cut(self, view: memoryview) -> Iterator[tuple[bytes, memoryview]]:
        start = 0
        while True:
            left = len(view) - start
            whole = PREFIX.size
            if left >= whole:
                header_size, body_size = PREFIX.unpack_from(view, start)
                if header_size > MAX_HEADER_BYTES or body_size > MAX_BODY_BYTES:
                    raise BrokenFrame(f"header of {header_size} bytes, body of {body_size} bytes")
                whole += header_size + body_size
            if left < whole:
                break
            body = start + PREFIX.size + header_size
            end = start + whole
            yield bytes(view[start + PREFIX.size : body]), view[body:end]
            start = end
        self._parts = [bytes(view[start:])] if left else []
        self._size, self._needed = left, whole
