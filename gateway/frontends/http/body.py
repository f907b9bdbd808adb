"""Bodies: limits, compression, and the division into JSON and binary data."""

import asyncio
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from gateway.client_limits import most_decompressed, too_compressed
from gateway.errors import Code, InferenceError
from gateway.frontends.http.connection_parts import LENGTH, content_length
from gateway.frontends.http.errors import plain_error
from gateway.frontends.http.request_scope import OnDisconnect
from gateway.tensor import Buffer
from gateway.threads import LARGE_BYTES, Threads

T = TypeVar("T")

MAX_CHUNKS = 65536
"""Non-empty chunks of one body, as Triton limits them."""

HEADER_LENGTH = b"inference-header-content-length"
INTEGER = re.compile(r"[+-]?\d+")
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
SHORT_NUMBER = 10
"""A number with fewer digits is in range."""

IDENTITY = "identity"
WINDOW_BITS = {"gzip": 31, "deflate": 15}
"""The encodings, and the `wbits` of zlib for each."""

SUPPORTED = "gzip, deflate"
MOST_ACCEPTED = 32
"""Values of `Accept-Encoding` whose encoding is kept: a client repeats its own."""
LEVEL = 1
"""The fastest: clients ask for compression of tensors because of a slow network."""

INLINE_BYTES = LARGE_BYTES
"""Larger bodies are compressed and decompressed in a thread."""
PART_BYTES = 1 << 23
"""Bytes that one call decompresses."""

Headers = Mapping[bytes, bytes]
"""A request's headers by lower-case name."""

InferBody = tuple[bytes | memoryview | None, memoryview]
"""The JSON and the bytes behind it. None as JSON: all bytes are one input (raw binary request).

JSON of more than LARGE_BYTES is a view.
"""


async def read_body(request: Request, limit: int) -> bytes | bytearray:
    """The whole body; a large one is not copied.

    INVALID_ARG beyond `limit` bytes or MAX_CHUNKS chunks; CANCELLED if the client disconnects.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit():
        check_json_size(limit, int(announced))
    body = await collect(request.receive, partial(check_json_size, limit))
    return body if len(body) > LARGE_BYTES else bytes(body)


async def read_compressed(
    receive: Receive,
    encoding: str,
    limit: int,
    threads: Threads,
    max_chunks: int | None = MAX_CHUNKS,
) -> bytes:
    """The whole body, decompressed to at most `limit` bytes; INVALID_ARG if it is larger."""
    compressed = await collect(receive, partial(_check_compressed, limit), max_chunks)
    return await decompress(encoding, compressed, limit, threads)


async def decoded(threads: Threads, scope: Scope, decode: Callable[[Buffer], T], body: Buffer) -> T:
    """The result of `decode` for a body; one of more than LARGE_BYTES is decoded in a thread.

    CANCELLED if the client disconnects meanwhile.
    """
    if len(body) <= LARGE_BYTES:
        return decode(body)
    return await off_loop(threads, scope, decode, body)


async def off_loop(
    threads: Threads, scope: Scope, function: Callable[..., T], *arguments: object
) -> T:
    """Call a function of a request's body in a thread.

    CANCELLED if the client disconnects meanwhile; a call that has not begun is dropped then.
    """
    work = threads.start(function, *arguments)
    try:
        with OnDisconnect(scope, work.cancel):
            await asyncio.wait([work])
        if work.cancelled():
            text = "the client disconnected while its body was decoded"
            raise InferenceError(Code.CANCELLED, text)
        return work.result()
    finally:
        work.cancel()
        # The traceback of its error refers to this frame: a cycle with the whole body.
        del work


async def collect(
    receive: Receive, check: Callable[[int], None] | None, max_chunks: int | None = MAX_CHUNKS
) -> bytes | bytearray:
    """The whole body, held once; `check` raises if the size so far exceeds its limit.

    INVALID_ARG beyond `max_chunks` chunks, CANCELLED if the client disconnects before the end.
    """
    message = await receive()
    body = message.get("body", b"")
    if message["type"] == "http.request" and not message.get("more_body", False):
        if check is not None:
            check(len(body))
        return body  # type: ignore[no-any-return] # ASGI's messages are untyped
    found, chunks = bytearray(), 0
    while message["type"] == "http.request":
        body = message.get("body", b"")
        found += body
        chunks += bool(body)
        if check is not None:
            check(len(found))
        if max_chunks is not None and chunks > max_chunks:
            raise _too_many_chunks(max_chunks)
        if not message.get("more_body", False):
            return found
        message = await receive()
    raise InferenceError(Code.CANCELLED, "client disconnected before the request body was complete")


async def read_infer_body(
    receive: Receive, headers: Headers, encoding: str, limit: int, threads: Threads
) -> InferBody:
    """Read and divide a body with that content encoding.

    `limit` is the maximum in bytes of the JSON, of a raw request, and of a decompressed body.
    Binary data behind the JSON has no limit, as in Triton. Raises INVALID_ARG for a part that is
    too large or contradicts its headers.
    """
    length = header_length(headers)
    announced = None
    if b"transfer-encoding" not in headers:
        announced = content_length(headers.get(LENGTH, b"0"))
    max_chunks = MAX_CHUNKS if announced is None else None
    if encoding in WINDOW_BITS:
        found = await read_compressed(receive, encoding, limit, threads, max_chunks)
        return divide(found, length, limit)
    if announced is not None and not (length is not None and 0 < length <= announced <= limit):
        _check_announced(length, limit, announced)
    # An announced size is that of the body (RFC 9112, 6.3).
    check = partial(_check_part, length, limit) if announced is None else None
    body = await collect(receive, check, max_chunks)
    return divide(body, length, limit)


def divide(body: bytes | bytearray, length: int | None, limit: int) -> InferBody:
    """Divide a body behind its first `length` bytes; None: the request lacks that header."""
    view = memoryview(body).toreadonly()
    if length == 0 or not body:
        _check_raw(limit, len(body))
        return None, view
    if length is None:
        check_json_size(limit, len(body))
        return view if len(view) > LARGE_BYTES else bytes(view), view[:0]
    if not 0 < length <= min(len(body), limit):
        _check_range(length, len(body))
        check_json_size(limit, length)
    header = view[:length]
    return header if length > LARGE_BYTES else bytes(header), view[length:]


def header_length(headers: Headers) -> int | None:
    """The length of the JSON in bytes, None without that header; it may be negative.

    INVALID_ARG unless it is a 32-bit integer (binary tensor data extension).
    """
    value = headers.get(HEADER_LENGTH)
    if value is None:
        return None
    if len(value) < SHORT_NUMBER and value.isdigit():
        return int(value)
    text = value.decode("latin-1").strip()
    if not INTEGER.fullmatch(text) or not text.isascii():
        raise InferenceError(
            Code.INVALID_ARG, f"Unable to parse Inference-Header-Content-Length, got: {text}"
        )
    number = int(text[:12])
    if len(text) > 12 or not INT_MIN <= number <= INT_MAX:
        raise InferenceError(
            Code.INVALID_ARG,
            "Unable to parse Inference-Header-Content-Length, value is out of range "
            f"[ {INT_MIN}, {INT_MAX} ], got: {text}",
        )
    return number


def _check_announced(length: int | None, limit: int, size: int) -> None:
    """Refuse a body by its announced size, before reading it."""
    if length:
        _check_range(length, size)
        check_json_size(limit, length)
    else:
        _check_part(length, limit, size)


def _check_part(length: int | None, limit: int, size: int) -> None:
    """Refuse a body as soon as a part exceeds its limit."""
    if length is None:
        check_json_size(limit, size)
    elif length == 0:
        _check_raw(limit, size)
    else:
        check_json_size(limit, length)


def _check_range(length: int, size: int) -> None:
    if not 0 < length <= size:
        raise InferenceError(
            Code.INVALID_ARG,
            f"inference header size should be in range (0, {size}), got: {length}",
        )


def _check_raw(limit: int, size: int) -> None:
    if size > limit:
        raise InferenceError(
            Code.INVALID_ARG,
            f"Raw input has a byte_size ({size} bytes) that exceeds the maximum allowed value of "
            f"{limit} bytes. Use --http-max-input-size to increase the limit.",
        )


def _check_compressed(limit: int, size: int) -> None:
    if size > most_compressed(limit):
        raise too_large(limit)


def check_json_size(limit: int, size: int) -> None:
    """Raise INVALID_ARG if JSON of `size` bytes exceeds `limit`."""
    if size > limit:
        raise InferenceError(
            Code.INVALID_ARG,
            f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} "
            "bytes. Use --http-max-input-size to increase the limit.",
        )


def _too_many_chunks(limit: int) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f"Chunked request body exceeds maximum of {limit} non-empty chunks. Send fewer or larger "
        "HTTP chunks.",
    )


@lru_cache(MOST_ACCEPTED)
def accepted(header: str) -> str:
    """The supported encoding with the highest quality in `Accept-Encoding`, else identity."""
    best, best_quality = IDENTITY, 0.0
    for entry in header.split(","):
        name, _, parameters = entry.partition(";")
        if (found := name.strip()) == IDENTITY or found in WINDOW_BITS:
            quality = _quality(parameters)
            if quality > best_quality:
                best, best_quality = found, quality
    return best


def answer_encoding(headers: Headers) -> str:
    """The encoding of the answer to a request with these headers."""
    accepts = headers.get(b"accept-encoding")
    return accepted(accepts.decode("latin-1")) if accepts else IDENTITY


def _quality(parameters: str) -> float:
    key, _, value = parameters.strip().partition("=")
    if key.strip() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


async def decompress(encoding: str, body: Buffer, limit: int, threads: Threads) -> bytes:
    """The decompressed body, of at most `limit` bytes; no more than that is decompressed.

    Raises INVALID_ARG if it is larger, truncated, followed by other bytes, or not of that encoding,
    and if its ratio is that of a bomb (`most_decompressed`).
    """
    inflater = zlib.decompressobj(WINDOW_BITS[encoding])
    most = min(limit, most_decompressed(len(body)))
    try:
        found, rest = b"", body
        if len(body) <= INLINE_BYTES:
            found = inflater.decompress(body, min(most + 1, INLINE_BYTES))
            rest = inflater.unconsumed_tail
        if not inflater.eof and len(found) <= most:
            found = await threads.run(_inflated, inflater, found, rest, most + 1)
    except zlib.error as error:
        raise InferenceError(
            Code.INVALID_ARG, f"failed to decompress the {encoding} request body: {error}"
        ) from None
    if len(found) > limit:
        raise too_large(limit)
    if len(found) > most:
        text = too_compressed("a request body", len(body), encoding)
        raise InferenceError(Code.INVALID_ARG, text)
    if not inflater.eof or inflater.unused_data:
        end = "something follows" if inflater.eof else "it ends before"
        raise InferenceError(
            Code.INVALID_ARG,
            f"failed to decompress the {encoding} request body: {end} its end marker",
        )
    return found


def _inflated(inflater: Any, found: bytes, rest: Buffer, most: int) -> bytes:
    """`found` and the decompressed rest of the body, of at most `most` bytes together."""
    parts, size = [found], len(found)
    while size < most and not inflater.eof:
        part = inflater.decompress(rest, min(most - size, PART_BYTES))
        if not part:
            break
        parts.append(part)
        size, rest = size + len(part), inflater.unconsumed_tail
    return b"".join(parts)


def most_compressed(limit: int) -> int:
    """The largest compressed body that can have `limit` bytes decompressed."""
    return limit + limit // 1000 + 1024


def too_large(limit: int) -> InferenceError:
    """The error of a body that exceeds the limit once decompressed."""
    return InferenceError(
        Code.INVALID_ARG,
        f"Decompressed data size exceeds the maximum allowed value of {limit} bytes. Use "
        "--http-max-input-size to increase the limit.",
    )


async def compress(encoding: str, parts: Sequence[Buffer], threads: Threads) -> bytes:
    """The joined parts, compressed."""
    if sum(map(len, parts)) > INLINE_BYTES:
        return await threads.run(_compress, encoding, parts)
    return _compress(encoding, parts)


def _compress(encoding: str, parts: Sequence[Buffer]) -> bytes:
    deflater = zlib.compressobj(LEVEL, zlib.DEFLATED, WINDOW_BITS[encoding])
    return b"".join([*map(deflater.compress, parts), deflater.flush()])


def unknown_encoding() -> Response:
    """The refusal of a body with a compression that is unknown."""
    return plain_error(501, "Unsupported compression type", {"Accept-Encoding": SUPPORTED})
