"""Compression of bodies: gzip and deflate."""

import zlib
from collections.abc import Sequence
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.tensor import Buffer
from gateway.threads import LARGE_BYTES, Threads

IDENTITY = "identity"
WINDOW_BITS = {"gzip": 31, "deflate": 15}
"""The encodings, and the `wbits` of zlib for each."""

SUPPORTED = "gzip, deflate"
LEVEL = 1
"""The fastest: clients ask for compression of tensors because of a slow network."""

INLINE_BYTES = LARGE_BYTES
"""Larger bodies are compressed and decompressed in a thread."""
PART_BYTES = 1 << 23
"""Bytes that one call decompresses."""


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

    Raises INVALID_ARG if it is larger, truncated, followed by other bytes, or not of that encoding.
    """
    inflater = zlib.decompressobj(WINDOW_BITS[encoding])
    try:
        found, rest = b"", body
        if len(body) <= INLINE_BYTES:
            found = inflater.decompress(body, min(limit + 1, INLINE_BYTES))
            rest = inflater.unconsumed_tail
        if not inflater.eof and len(found) <= limit:
            found = await threads.run(_inflated, inflater, found, rest, limit + 1)
    except zlib.error as error:
        raise InferenceError(
            Code.INVALID_ARG, f"failed to decompress the {encoding} request body: {error}"
        ) from None
    if len(found) > limit:
        raise too_large(limit)
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
