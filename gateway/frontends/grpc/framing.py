"""Messages in the bytes of a stream: each has five bytes before it (gRPC over HTTP/2)."""

import struct
import zlib
from collections.abc import Iterator, Sequence

from gateway.frontends.grpc.rpc import RpcError, StatusCode
from gateway.settings import CompressionLevel
from gateway.threads import LARGE_BYTES, Threads

HEAD = struct.Struct(">BL")
"""Whether a message is compressed, and how many bytes follow."""

PLAIN, COMPRESSED = 0, 1
IDENTITY = "identity"
WINDOW_BITS = {"gzip": 31, "deflate": 15}
"""The compressions that a message may have, and what zlib calls their form."""

ACCEPTED = ",".join((IDENTITY, *WINDOW_BITS))

SMALL_BYTES = 1024
"""A part of a message that is smaller does not stay an object of its own."""

COPIED_BYTES = 64 << 10
"""A larger message is sent in two pieces, because copying it takes longer."""

JOINED_BYTES = 1 << 20
"""Joining the parts of a message that is larger takes more than a moment."""

QUICK_BYTES = 1024
"""So much of a compressed message becomes at most a megabyte: deflate has a ratio of up to 1032."""


class Deframer:
    """Cuts messages out of the chunks of one stream, wherever those are cut.

    `encoding` is the stream's compression, and messages have at most `max_bytes`, also when they
    are decompressed. Raises RpcError, after which nothing more may be fed.
    """

    def __init__(self, encoding: str, max_bytes: int) -> None:
        if encoding != IDENTITY and encoding not in WINDOW_BITS:
            raise RpcError(
                StatusCode.UNIMPLEMENTED,
                f"messages are compressed by '{encoding[:64]}', expected one of {ACCEPTED}",
            )
        self.encoding = encoding
        self._max_bytes = max_bytes
        self._head = b""
        self._flag = PLAIN
        self._size = 0
        self._missing = 0
        self._parts: list[bytes | bytearray | memoryview] = []

    def quick(self, chunk: bytes) -> bool:
        """Whether feeding this chunk takes no longer than copying it."""
        if self.encoding == IDENTITY:
            return self._size <= JOINED_BYTES or len(chunk) < self._missing
        return self._came + len(chunk) <= QUICK_BYTES

    def feed(self, chunk: bytes) -> Sequence[bytes]:
        """The messages that end in this chunk."""
        if not self._head and len(chunk) >= HEAD.size:
            # As a rule, a chunk is a message.
            flag, size = HEAD.unpack_from(chunk)
            if flag == PLAIN and len(chunk) == HEAD.size + size and size <= self._max_bytes:
                return (chunk[HEAD.size :],)
        return list(self._cut(chunk))

    def end(self) -> None:
        """No chunk will follow; an error if a message is not whole."""
        if self._head:
            raise RpcError(
                StatusCode.INTERNAL,
                f"the stream ended within a message: {self._came} bytes came of"
                f" {HEAD.size + self._size}",
            )

    @property
    def _came(self) -> int:
        return len(self._head) + self._size - self._missing

    def _cut(self, chunk: bytes) -> Iterator[bytes]:
        at, view = 0, memoryview(chunk)
        while at < len(chunk):
            if len(self._head) < HEAD.size:
                part = chunk[at : at + HEAD.size - len(self._head)]
                at += len(part)
                self._head += part
                if len(self._head) < HEAD.size:
                    return
                self._begin()
            # A view would keep the messages before it, too.
            kept = (view if at <= HEAD.size else chunk)[at : at + self._missing]
            at += len(kept)
            self._missing -= len(kept)
            self._keep(kept)
            if not self._missing:
                yield self._whole()

    def _begin(self) -> None:
        self._flag, self._size = HEAD.unpack(self._head)
        self._missing = self._size
        if self._size > self._max_bytes:
            raise RpcError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"a message of {self._size} bytes is larger than the limit of"
                f" {self._max_bytes} bytes",
            )
        if self._flag not in (PLAIN, COMPRESSED):
            raise RpcError(
                StatusCode.INTERNAL, f"a message has the flag {self._flag}, expected 0 or 1"
            )
        if self._flag == COMPRESSED and self.encoding == IDENTITY:
            raise RpcError(
                StatusCode.INTERNAL, "a message is compressed, and 'grpc-encoding' does not say how"
            )

    def _keep(self, part: bytes | memoryview) -> None:
        """Small parts are put together: as objects of their own they would be many times larger."""
        last = self._parts[-1] if self._parts else None
        if len(part) >= SMALL_BYTES:
            self._parts.append(part)
        elif isinstance(last, bytearray):
            last += part
        elif part:
            self._parts.append(bytearray(part))

    def _whole(self) -> bytes:
        # A join of bytes alone releases the interpreter lock while it copies.
        message = b"".join([bytes(part) for part in self._parts])
        self._head, self._parts, self._size = b"", [], 0
        return message if self._flag == PLAIN else self._decompressed(message)

    def _decompressed(self, message: bytes) -> bytes:
        if not message:
            return message  # as gRPC's own libraries take it
        decompressor = zlib.decompressobj(WINDOW_BITS[self.encoding])
        try:
            # One byte more than may be, to tell what fits exactly from what does not.
            found = decompressor.decompress(message, self._max_bytes + 1)
        except zlib.error:
            raise self._malformed() from None
        if len(found) > self._max_bytes:
            raise RpcError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"a decompressed message is larger than the limit of {self._max_bytes} bytes",
            )
        if not decompressor.eof or decompressor.unused_data:
            raise self._malformed()
        return found

    def _malformed(self) -> RpcError:
        return RpcError(StatusCode.INTERNAL, f"a message is not in the form of {self.encoding}")


def framed(messages: Sequence[bytes]) -> Sequence[bytes]:
    """Messages as they are sent, one behind the other; a large one is not copied for that."""
    if len(messages) == 1:
        (message,) = messages
        head = HEAD.pack(PLAIN, len(message))
        return (head, message) if len(message) > COPIED_BYTES else (head + message,)
    parts = (part for each in messages for part in (HEAD.pack(PLAIN, len(each)), each))
    return (b"".join(parts),)


def compressed(messages: Sequence[bytes], encoding: str, level: int) -> bytes:
    """The same, each compressed unless it is smaller as it is; `level` is zlib's, 1 to 9."""
    packed: list[bytes] = []
    for message in messages:
        compressor = zlib.compressobj(level, zlib.DEFLATED, WINDOW_BITS[encoding])
        data = compressor.compress(message) + compressor.flush()
        smaller = len(data) < len(message)
        packed += (HEAD.pack(COMPRESSED, len(data)), data) if smaller else framed((message,))
    return b"".join(packed)


RANKED = ("gzip", "deflate")
"""What gRPC compresses by, in the order of its levels (C-core, compression_internal)."""

ZLIB_LEVEL = 6
"""Whatever the level is: that only chooses the algorithm, as in gRPC."""


def encoding_for(level: CompressionLevel, accepted: str) -> str:
    """The algorithm for a level among those in `grpc-accept-encoding`; IDENTITY if there is none.

    Low is the first of those in RANKED, high the last, medium the one in the middle.
    """
    names = {name.strip() for name in accepted.split(",")}
    found = [name for name in RANKED if name in names]
    if level is CompressionLevel.NONE or not found:
        return IDENTITY
    if level is CompressionLevel.LOW:
        return found[0]
    return found[-1] if level is CompressionLevel.HIGH else found[len(found) // 2]


async def packed(messages: Sequence[bytes], encoding: str, threads: Threads) -> bytes:
    """Messages as they are sent, compressed where that makes them smaller."""
    if sum(map(len, messages)) <= LARGE_BYTES:
        return compressed(messages, encoding, ZLIB_LEVEL)
    return await threads.run(compressed, messages, encoding, ZLIB_LEVEL)
