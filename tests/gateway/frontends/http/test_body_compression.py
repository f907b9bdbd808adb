"""Compressed bodies (protocol: compression)."""

import gzip
import random
import tracemalloc
import zlib

import pytest

from gateway import client_limits
from gateway.errors import Code, InferenceError
from gateway.frontends.http.body import (
    INLINE_BYTES,
    accepted,
    compress,
    decompress,
    most_compressed,
)
from gateway.threads import request_threads
from tests.builders import soon

THREADS = request_threads()
COMPRESSORS = {"gzip": gzip.compress, "deflate": zlib.compress}
SIZES = [0, 1, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, 3 * INLINE_BYTES]


@pytest.mark.parametrize(
    ("header", "encoding"),
    [
        ("", "identity"),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate", "gzip"),
        ("deflate,gzip", "deflate"),
        ("gzip;q=0.5, deflate;q=0.8", "deflate"),
        ("identity;q=1, gzip;q=0.5", "identity"),
        ("identity, gzip", "identity"),
        ("gzip;q=0", "identity"),
        ("gzip;q=abc", "identity"),
        ("gzip; q = 0.3", "gzip"),
        ("br, *", "identity"),
        ("br;q=1.0, gzip;q=0.1", "gzip"),
        ("GZIP", "identity"),
        (",;,", "identity"),
        ("gzip;q=nan", "identity"),
    ],
)
def test_the_best_accepted_encoding_is_chosen(header: str, encoding: str) -> None:
    assert accepted(header) == encoding


@pytest.mark.parametrize("encoding", COMPRESSORS)
@pytest.mark.parametrize("size", SIZES)
async def test_a_body_is_decompressed(encoding: str, size: int) -> None:
    body = (b"0123456789" * size)[:size]
    compressed = COMPRESSORS[encoding](body)
    assert await soon(decompress(encoding, compressed, 10 * INLINE_BYTES, THREADS)) == body
    assert await soon(decompress(encoding, bytearray(compressed), max(size, 1), THREADS)) == body


@pytest.mark.parametrize("encoding", COMPRESSORS)
@pytest.mark.parametrize("size", [2, 1000, INLINE_BYTES, INLINE_BYTES + 1, 2 * INLINE_BYTES])
async def test_a_body_is_not_decompressed_beyond_its_limit(encoding: str, size: int) -> None:
    compressed = COMPRESSORS[encoding](bytes(size))
    assert await soon(decompress(encoding, compressed, size, THREADS)) == bytes(size)
    with pytest.raises(InferenceError) as caught:
        await soon(decompress(encoding, compressed, size - 1, THREADS))
    assert (caught.value.code, caught.value.message) == (
        Code.INVALID_ARG,
        f"Decompressed data size exceeds the maximum allowed value of {size - 1} bytes. Use "
        "--http-max-input-size to increase the limit.",
    )


async def test_a_bomb_takes_no_more_memory_than_the_limit() -> None:
    bomb, limit = gzip.compress(bytes(200 << 20), compresslevel=9), 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(InferenceError, match="Decompressed data size exceeds"):
            await soon(decompress("gzip", bomb, limit, THREADS))
        assert tracemalloc.get_traced_memory()[1] < 4 * limit
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", COMPRESSORS)
async def test_a_body_has_a_limited_ratio(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    monkeypatch.setattr(client_limits, "FREE_BYTES", 1 << 20)
    limit, mebibyte = 1 << 25, 1 << 20
    compress_all = COMPRESSORS[encoding]
    whole = await soon(decompress(encoding, compress_all(bytes(mebibyte)), limit, THREADS))
    assert whole == bytes(mebibyte)
    packed = compress_all(bytes(mebibyte + 1))
    with pytest.raises(InferenceError) as caught:
        await soon(decompress(encoding, packed, limit, THREADS))
    assert (caught.value.code, caught.value.message) == (
        Code.INVALID_ARG,
        f"a request body of {len(packed)} bytes in {encoding} has more than 1048576 bytes of data, "
        "expected at most 100 for each byte, or 1048576; send it uncompressed",
    )
    dense = random.Random(1).randbytes(mebibyte // 8) + bytes(8 * mebibyte)
    assert await soon(decompress(encoding, compress_all(dense), limit, THREADS)) == dense


@pytest.mark.parametrize("encoding", COMPRESSORS)
@pytest.mark.parametrize("size", [10, 2 * INLINE_BYTES])
async def test_a_body_that_is_cut_damaged_or_too_long_is_refused(encoding: str, size: int) -> None:
    whole = COMPRESSORS[encoding](bytes(size))
    damaged = bytes([whole[0] ^ 0xFF]) + whole[1:]
    wrong_sum = whole[:-5] + bytes([whole[-5] ^ 0xFF]) + whole[-4:]
    for body in (b"", whole[:-1], whole[:5], damaged, wrong_sum, whole + b"x", b"junk"):
        with pytest.raises(InferenceError, match="failed to decompress the") as caught:
            await soon(decompress(encoding, body, 10 * INLINE_BYTES, THREADS))
        assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("size", [1000, 100_000])
def test_a_body_that_cannot_fit_is_refused_before_it_is_decompressed(size: int) -> None:
    incompressible = zlib.compress(bytes(size), level=0)
    assert len(incompressible) <= most_compressed(size)


@pytest.mark.parametrize("encoding", COMPRESSORS)
@pytest.mark.parametrize("size", SIZES)
async def test_a_response_is_compressed_as_one(encoding: str, size: int) -> None:
    parts = [b"{}", memoryview(bytes(size)), b""]
    found = await soon(compress(encoding, parts, THREADS))
    assert await soon(decompress(encoding, found, 10 * INLINE_BYTES, THREADS)) == b"{}" + bytes(
        size
    )
