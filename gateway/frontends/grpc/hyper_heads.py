"""Heads of RPCs that are too large: hyper keeps no headers above a size, and does not say so."""

import struct
from typing import Any

from httpunk.h2.server import ServerConnection, ServerRequest

KEPT_BYTES = 256 << 10
"""Size of a head up to which hyper keeps all of its headers; four times of it end a connection."""

MOST_BYTES = 64 << 10
"""Size of a head above which it is refused: its names and values, and FIELD_BYTES for each."""

METADATA_BYTES = 32 << 10
"""Bytes from which a head that comes in several reads is too large, however few it has in the end.

hyper may have dropped a value in these: one that makes a head exceed KEPT_BYTES comes in several.
"""

FIELD_BYTES = 32
"""Size of a header besides its name and value (RFC 9113, 6.5.2)."""

FEW, READ_BYTES = 12, 2048
"""A head is not too large if its headers and each READ_BYTES received are at most FEW together.

One that is an index of HPACK's table has at most the 4 KiB of that, as have the four of HTTP/2
itself; others have less than two bytes in each received one: five bits are one in Huffman's code.
"""


HEAD_SETTING = struct.Struct(">HL")
HEAD_NUMBER = 6
"""The setting SETTINGS_MAX_HEADER_LIST_SIZE (RFC 9113, 6.5.2)."""


class LargeRequest(ServerRequest):
    """A request whose head is too large: hyper may have dropped some of it."""


def is_large(frame: Any) -> bool:
    """Whether the head of an RPC is too large, all of which hyper has kept."""
    size = sum(len(name) + len(value) + FIELD_BYTES for name, value in frame.headers.raw_items())
    pseudo = (frame.method, frame.scheme, frame.authority, frame.path)
    return size + sum(len(each or "") + FIELD_BYTES for each in pseudo) > MOST_BYTES


class AnnouncedHeads(ServerConnection):
    """A connection that announces MOST_BYTES, and keeps KEPT_BYTES of a head.

    A client that heeds the limit, such as gRPC's for Go, fails an RPC with a larger head itself. In
    frames of 16 KiB, as it sends them, the head could end the connection with all of its RPCs.
    """

    _transport: Any

    async def start(self) -> None:
        """Override of httpunk: send the settings, then start to read and to write."""
        stream = self._transport
        self._transport = _Announcing(stream)
        try:
            await super().start()  # type: ignore[no-untyped-call]
        finally:
            self._transport = stream


class _Announcing:
    """Sends the settings to a stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def send_all(self, data: memoryview) -> None:
        """Send them with the other limit."""
        kept, most = (HEAD_SETTING.pack(HEAD_NUMBER, size) for size in (KEPT_BYTES, MOST_BYTES))
        await self._stream.send_all(bytes(data).replace(kept, most, 1))
