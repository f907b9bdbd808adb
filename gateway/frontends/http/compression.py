"""Compressed bodies: which encodings there are, and how a body gets from one to the other."""

import zlib
from collections.abc import Sequence
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.tensor import Buffer
from gateway.threads import LARGE_BYTES, Threads

IDENTITY = "identity"
WINDOW_BITS = {"gzip": 31, "deflate": 15}
"""The encodings by name, and what zlib calls the wrapper of each."""

SUPPORTED = "gzip, deflate"
LEVEL = 1
"""Fast: whoever asks for compression on a server of tensors has a thin line, not spare time."""

INLINE_BYTES = LARGE_BYTES
"""Bodies beyond this size are worked on in a thread, so that the event loop stays free."""
PART_BYTES = 1 << 23
"""What is made of a body at once."""


def accepted(header: str) -> str:
    """The encoding that `Accept-Encoding` likes best of those there are, else identity."""
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
    """The body before it was compressed, which may have `limit` bytes; nothing more is made of it.

    Raises INVALID_ARG if it is larger, cut short or not of that encoding.
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
    """What was found, and what the rest of the body becomes, up to so many bytes in all."""
    parts, size = [found], len(found)
    while size < most and not inflater.eof:
        part = inflater.decompress(rest, min(most - size, PART_BYTES))
        if not part:
            break
        parts.append(part)
        size, rest = size + len(part), inflater.unconsumed_tail
    return b"".join(parts)


def most_compressed(limit: int) -> int:
    """The size of a body that cannot but be larger than the limit once it is decompressed."""
    return limit + limit // 1000 + 1024


def too_large(limit: int) -> InferenceError:
    """A body that is, or would become, larger than the limit."""
    return InferenceError(
        Code.INVALID_ARG,
        f"Decompressed data size exceeds the maximum allowed value of {limit} bytes. Use "
        "--http-max-input-size to increase the limit.",
    )


async def compress(encoding: str, parts: Sequence[Buffer], threads: Threads) -> bytes:
    """The parts in one, compressed."""
    if sum(map(len, parts)) > INLINE_BYTES:
        return await threads.run(_compress, encoding, parts)
    return _compress(encoding, parts)


def _compress(encoding: str, parts: Sequence[Buffer]) -> bytes:
    deflater = zlib.compressobj(LEVEL, zlib.DEFLATED, WINDOW_BITS[encoding])
    return b"".join([*map(deflater.compress, parts), deflater.flush()])
