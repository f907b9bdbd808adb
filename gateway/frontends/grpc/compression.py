"""How are answers compressed: by what the client accepts, as grpcio does it."""

from collections.abc import Sequence

from gateway.frontends.grpc.framing import IDENTITY, compressed
from gateway.settings import CompressionLevel
from gateway.threads import LARGE_BYTES, Threads

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
