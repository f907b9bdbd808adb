"""Wire format of gRPC over HTTP/2: headers, metadata, framing and compression of messages."""

import base64
import binascii
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import quote

from gateway.client_limits import most_decompressed, too_compressed
from gateway.frontends.grpc.hyper_heads import METADATA_BYTES, LargeRequest
from gateway.frontends.grpc.status import Metadata, RpcError, StatusCode
from gateway.settings import CompressionLevel
from gateway.threads import LARGE_BYTES, Threads

TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
SECS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}

POST = "POST"
CONTENT_TYPES = (b"application/grpc", b"application/grpc+proto")
CONTENT_TYPE = re.compile(rb"application/grpc([+;].*)?", re.IGNORECASE)
"""Accepted content types; as in grpcio the suffix does not select the message format."""

SHOWN_CHARS = 32
NO_TRAILERS = "the request has no 'te: trailers': something on the way may not pass on trailers"
DEADLINE = "grpc-timeout"
DEADLINE_PASSED = "Deadline Exceeded"
"""The text of gRPC's own server, and so of Triton."""

ENCODING = "grpc-encoding"

OWN = frozenset({b"te", b"content-type", b"content-length", b"host"})
OWN_PREFIX = b"grpc-"
"""Headers of the protocol, which are not metadata."""

BINARY = "-bin"
PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
"""Characters of `grpc-message` without percent-encoding."""

HEAD = struct.Struct(">BL")
"""Prefix of a message: compressed flag, size in bytes."""

PLAIN, COMPRESSED = 0, 1
IDENTITY = "identity"
WINDOW_BITS = {"gzip": 31, "deflate": 15}
"""zlib's window bits of each supported encoding."""

ACCEPTED = ",".join((IDENTITY, *WINDOW_BITS))

SMALL_BYTES = 1024
"""Parts of a message below this size are joined, because objects cost memory."""

COPIED_BYTES = 64 << 10
"""A larger message is sent in two pieces, because copying it takes longer."""

JOINED_BYTES = 1 << 20
"""Size above which joining the parts of a message would block the event loop."""

INPUT_BYTES, PART_BYTES = 1 << 18, 1 << 22
"""Bytes that one call decompresses, and that it returns."""

QUICK_BYTES = 1024
"""Compressed size that becomes at most 1 MiB; deflate has a ratio of up to 1032."""


class NotGrpc(RpcError):
    """A request that is not gRPC, answered with an HTTP status for other clients."""

    def __init__(self, http_status: int, status: StatusCode, details: str) -> None:
        super().__init__(status, details)
        self.http_status = http_status


def require_grpc(request: Any) -> None:
    """Raise NotGrpc for a request that is not gRPC, RpcError for invalid headers.

    The request has `method`, `path` and `headers` of httpunk. Source: gRPC over HTTP/2, "Requests";
    the gRPC statuses are those of gRPC for Go.
    """
    if isinstance(request, LargeRequest):
        text = f"the metadata are larger than the limit of {METADATA_BYTES} bytes"
        raise RpcError(StatusCode.RESOURCE_EXHAUSTED, text)
    headers = request.headers
    if request.method != POST:
        shown = (request.method or "missing")[:SHOWN_CHARS]
        raise NotGrpc(405, StatusCode.INTERNAL, f"the HTTP method is {shown}, expected {POST}")
    if request.path is None:
        raise NotGrpc(400, StatusCode.INTERNAL, "the request has no ':path'")
    if headers.get("content-type") not in CONTENT_TYPES:
        _require_content_type(headers.get("content-type", b""))
    if "te" not in headers:
        raise RpcError(StatusCode.INTERNAL, NO_TRAILERS)
    if BINARY in " ".join(headers.keys()):
        read_metadata(headers.raw_items())


def _require_content_type(found: bytes) -> None:
    if CONTENT_TYPE.fullmatch(found) is None:
        shown = found[:SHOWN_CHARS].decode("latin-1")
        raise NotGrpc(
            415,
            StatusCode.INVALID_ARGUMENT,
            f"'content-type' is '{shown}', expected application/grpc",
        )


def timeout_secs(value: bytes) -> float:
    """The seconds of a `grpc-timeout`; RpcError if it is invalid or zero."""
    found = TIMEOUT.fullmatch(value)
    if found is None:
        shown = value[:SHOWN_CHARS].decode("latin-1")
        raise RpcError(StatusCode.INTERNAL, f"'grpc-timeout' is '{shown}', expected such as '100m'")
    secs = int(found[1]) * SECS[found[2]]
    if not secs:
        raise RpcError(StatusCode.DEADLINE_EXCEEDED, DEADLINE_PASSED)
    return secs


def authority_of(request: Any) -> str:
    """The `:authority` of a request of httpunk, or its `host`; "" if it has neither."""
    if request.authority is not None:
        return str(request.authority)
    host: bytes = request.headers.get("host") or b""
    return host.decode("latin-1")


def read_metadata(headers: Iterable[tuple[bytes, bytes]]) -> Metadata:
    """The metadata among the headers of a request; RpcError for invalid base64."""
    return [
        pair
        for name, value in headers
        if name not in OWN and not name.startswith(OWN_PREFIX)
        for pair in _values(name.decode("latin-1"), value)
    ]


def _values(name: str, value: bytes) -> Iterator[tuple[str, str | bytes]]:
    if not name.endswith(BINARY):
        yield name, _text(value)
        return
    for each in value.split(b","):
        try:
            yield name, base64.b64decode(each + b"=" * (-len(each) % 4), validate=True)
        except binascii.Error:
            shown = name[:SHOWN_CHARS]
            raise RpcError(StatusCode.INTERNAL, f"metadata '{shown}' is not in base64") from None


def _text(value: bytes) -> str:
    """A value as UTF-8, else as Latin-1; as grpcio reads metadata."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def written_metadata(metadata: Metadata) -> Iterator[tuple[str, str]]:
    """The headers of metadata."""
    for name, value in metadata:
        text = value if isinstance(value, str) else base64.b64encode(value).decode().rstrip("=")
        yield name, text


def written_details(details: str) -> str:
    """The value of `grpc-message`, percent-encoded UTF-8."""
    return quote(details, safe=PRINTABLE, errors="replace")


class Deframer:
    """Extracts messages from the chunks of one stream.

    `encoding` is the compression of the stream; `max_bytes` limits messages before and after
    decompression. After an RpcError no further chunk may be fed.
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
        """Whether feeding this chunk is fast enough for the event loop."""
        if self.encoding == IDENTITY:
            return self._size <= JOINED_BYTES or len(chunk) < self._missing
        return self._came + len(chunk) <= QUICK_BYTES

    def feed(self, chunk: bytes) -> Sequence[bytes]:
        """The messages completed by this chunk."""
        message = None if self._head else only_message(chunk, self._max_bytes)
        return list(self._cut(chunk)) if message is None else (message,)

    def end(self) -> None:
        """The stream has ended; RpcError within a message."""
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
            # A view would keep the earlier messages of the chunk in memory.
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
        """Store a part of a message; small parts are joined, because objects cost memory."""
        last = self._parts[-1] if self._parts else None
        if len(part) >= SMALL_BYTES:
            self._parts.append(part)
        elif isinstance(last, bytearray):
            last += part
        elif part:
            self._parts.append(bytearray(part))

    def _whole(self) -> bytes:
        # Only a join of `bytes` releases the interpreter lock while copying.
        message = b"".join([bytes(part) for part in self._parts])
        self._head, self._parts, self._size = b"", [], 0
        return message if self._flag == PLAIN else self._decompressed(message)

    def _decompressed(self, message: bytes) -> bytes:
        if not message:
            return message  # as in gRPC's own libraries
        most = min(self._max_bytes, most_decompressed(len(message)))
        try:
            # One byte above the limit, to distinguish an exact fit from an excess.
            found = inflated(self.encoding, message, most + 1)
        except zlib.error:
            raise self._malformed() from None
        if len(found) > self._max_bytes:
            raise RpcError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"a decompressed message is larger than the limit of {self._max_bytes} bytes",
            )
        if len(found) > most:
            text = too_compressed("a message", len(message), self.encoding)
            raise RpcError(StatusCode.RESOURCE_EXHAUSTED, text)
        return found

    def _malformed(self) -> RpcError:
        return RpcError(StatusCode.INTERNAL, f"a message is not in the form of {self.encoding}")


def inflated(encoding: str, data: bytes, most: int) -> bytes:
    """The decompressed data, or their first `most` bytes; zlib.error if the data are not whole.

    In parts: one call holds the interpreter lock while it obtains the memory for its result, for a
    second if that is a gigabyte.
    """
    inflater = zlib.decompressobj(WINDOW_BITS[encoding])
    parts: list[bytes] = []
    size, view = 0, memoryview(data)
    for at in range(0, len(view), INPUT_BYTES):
        if inflater.eof:
            raise zlib.error("data behind the end")
        rest: bytes | memoryview = view[at : at + INPUT_BYTES]
        while not inflater.eof:
            part = inflater.decompress(rest, min(most - size, PART_BYTES))
            if not part:
                break  # it needs the next bytes
            parts.append(part)
            size, rest = size + len(part), inflater.unconsumed_tail
            if size == most:
                return b"".join(parts)
    if not inflater.eof or inflater.unused_data:
        raise zlib.error("no end, or data behind it")
    return b"".join(parts)


def only_message(chunk: bytes, max_bytes: int) -> bytes | None:
    """The message of a chunk that is one uncompressed message of a permitted size; else None."""
    if len(chunk) >= HEAD.size:
        flag, size = HEAD.unpack_from(chunk)
        if flag == PLAIN and len(chunk) == HEAD.size + size and size <= max_bytes:
            return chunk[HEAD.size :]
    return None


def framed(messages: Sequence[bytes]) -> Sequence[bytes]:
    """Messages with their prefixes; a single large message is not copied."""
    if len(messages) == 1:
        (message,) = messages
        head = HEAD.pack(PLAIN, len(message))
        return (head, message) if len(message) > COPIED_BYTES else (head + message,)
    parts: list[bytes] = []
    for each in messages:
        parts += (HEAD.pack(PLAIN, len(each)), each)
    return (b"".join(parts),)


def compressed(messages: Sequence[bytes], encoding: str, level: int) -> bytes:
    """Messages with their prefixes, each compressed if that makes it smaller.

    `level` is zlib's, 1 to 9.
    """
    packed: list[bytes] = []
    for message in messages:
        compressor = zlib.compressobj(level, zlib.DEFLATED, WINDOW_BITS[encoding])
        data = compressor.compress(message) + compressor.flush()
        smaller = len(data) < len(message)
        packed += (HEAD.pack(COMPRESSED, len(data)), data) if smaller else framed((message,))
    return b"".join(packed)


RANKED = ("gzip", "deflate")
"""Encodings in the order of gRPC's levels (C-core, compression_internal)."""

ZLIB_LEVEL = 6
"""zlib's level for all of gRPC's levels, which only choose the encoding."""


def encoding_for(level: CompressionLevel, accepted: str) -> str:
    """The encoding for a level, among those in `grpc-accept-encoding`; IDENTITY without one.

    As grpcio: of the accepted encodings in RANKED, low is the first, high the last, medium the
    middle one.
    """
    names = {name.strip() for name in accepted.split(",")}
    found = [name for name in RANKED if name in names]
    if level is CompressionLevel.NONE or not found:
        return IDENTITY
    if level is CompressionLevel.LOW:
        return found[0]
    return found[-1] if level is CompressionLevel.HIGH else found[len(found) // 2]


async def compressed_in_thread(messages: Sequence[bytes], encoding: str, threads: Threads) -> bytes:
    """As `compressed`, in a thread above LARGE_BYTES."""
    if sum(map(len, messages)) <= LARGE_BYTES:
        return compressed(messages, encoding, ZLIB_LEVEL)
    return await threads.run(compressed, messages, encoding, ZLIB_LEVEL)
