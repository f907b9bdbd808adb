"""Heads of RPCs that are too large: hyper keeps no headers above a size, and does not say so."""

from typing import Any

from httpunk.h2.server import ServerRequest

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


class LargeRequest(ServerRequest):
    """A request whose head is too large: hyper may have dropped some of it."""


def is_large(frame: Any) -> bool:
    """Whether the head of an RPC is too large, all of which hyper has kept."""
    size = sum(len(name) + len(value) + FIELD_BYTES for name, value in frame.headers.raw_items())
    pseudo = (frame.method, frame.scheme, frame.authority, frame.path)
    return size + sum(len(each or "") + FIELD_BYTES for each in pseudo) > MOST_BYTES
