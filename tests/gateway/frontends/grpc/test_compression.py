"""Answers are compressed by what the client accepts, in a thread if they are large."""

import gzip
import struct
import zlib

import pytest

from gateway.frontends.grpc.compression import encoding_for, packed
from gateway.frontends.grpc.framing import Deframer
from gateway.settings import CompressionLevel
from gateway.threads import LARGE_BYTES, request_threads

LEVELS = (CompressionLevel.LOW, CompressionLevel.MEDIUM, CompressionLevel.HIGH)
LIMIT = 1 << 30

THREADS = request_threads()


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        # What a real Triton chose.
        ("identity,deflate,gzip", ("gzip", "deflate", "deflate")),
        ("gzip", ("gzip", "gzip", "gzip")),
        ("deflate", ("deflate", "deflate", "deflate")),
        ("identity", ("identity", "identity", "identity")),
        ("", ("identity", "identity", "identity")),
        ("br, gzip , x", ("gzip", "gzip", "gzip")),
        ("GZIP,agzip", ("identity", "identity", "identity")),
    ],
)
def test_a_level_chooses_among_what_is_accepted(accepted: str, chosen: tuple[str, ...]) -> None:
    assert tuple(encoding_for(level, accepted) for level in LEVELS) == chosen
    assert encoding_for(CompressionLevel.NONE, accepted) == "identity"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("size", [0, 1, 1000, LARGE_BYTES, LARGE_BYTES + 1, 1 << 20])
async def test_messages_are_the_same_once_they_are_unpacked(encoding: str, size: int) -> None:
    messages = [b"a" * size, bytes(range(256)), b""]
    sent = await packed(messages, encoding, THREADS)
    assert list(Deframer(encoding, LIMIT).feed(sent)) == messages


async def test_what_is_smaller_as_it_is_stays_so() -> None:
    sent = await packed([bytes(range(256)), b"a" * 256], "deflate", THREADS)
    assert sent.startswith(struct.pack(">BL", 0, 256) + bytes(range(256)))
    flag, size = struct.unpack_from(">BL", sent, 5 + 256)
    assert (flag, size < 256) == (1, True)


async def test_the_forms_are_those_of_their_names() -> None:
    data = b"a" * 1000
    assert gzip.decompress((await packed([data], "gzip", THREADS))[5:]) == data
    assert zlib.decompress((await packed([data], "deflate", THREADS))[5:]) == data
