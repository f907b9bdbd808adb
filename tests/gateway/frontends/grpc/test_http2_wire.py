"""Framing and compression of messages, for streams cut anywhere."""

import gzip
import itertools
import random
import struct
import tracemalloc
import zlib
from collections.abc import Iterable, Sequence

import pytest

from gateway import client_limits
from gateway.frontends.grpc import http2_wire
from gateway.frontends.grpc.http2_wire import (
    ACCEPTED,
    COMPRESSED,
    COPIED_BYTES,
    HEAD,
    IDENTITY,
    PLAIN,
    QUICK_BYTES,
    SMALL_BYTES,
    Deframer,
    compressed,
    compressed_in_thread,
    encoding_for,
    framed,
)
from gateway.frontends.grpc.status import RpcError, StatusCode
from gateway.settings import CompressionLevel
from gateway.threads import LARGE_BYTES, request_threads

LIMIT = 100
TEXT = b"the quick brown fox"
PACK = {"gzip": gzip.compress, "deflate": zlib.compress}


def message(data: bytes, flag: int = PLAIN) -> bytes:
    return HEAD.pack(flag, len(data)) + data


def fed(chunks: Iterable[bytes], encoding: str = IDENTITY, limit: int = LIMIT) -> list[bytes]:
    """All messages of a stream of these chunks."""
    deframer = Deframer(encoding, limit)
    found = [each for chunk in chunks for each in deframer.feed(chunk)]
    deframer.end()
    return found


def failing(
    chunks: Sequence[bytes], encoding: str = IDENTITY, limit: int = LIMIT
) -> tuple[StatusCode, str]:
    with pytest.raises(RpcError) as caught:
        fed(chunks, encoding, limit)
    return caught.value.status, caught.value.details


def cuts(data: bytes, parts: int) -> Iterable[list[bytes]]:
    """The data cut into `parts` chunks in every possible way; some are empty."""
    for borders in itertools.combinations_with_replacement(range(len(data) + 1), parts - 1):
        edges = (0, *borders, len(data))
        yield [data[start:end] for start, end in itertools.pairwise(edges)]


SENT = [b"", b"a", b"", b"\0\0\0\0\0", TEXT]
STREAM = b"".join(map(message, SENT))


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_messages_are_the_same_wherever_the_stream_is_cut(parts: int) -> None:
    for chunks in cuts(STREAM, parts):
        assert fed(chunks) == SENT, chunks


@pytest.mark.parametrize("size", range(1, 12))
def test_messages_are_the_same_in_chunks_of_one_size(size: int) -> None:
    assert fed(STREAM[at : at + size] for at in range(0, len(STREAM), size)) == SENT


@pytest.mark.parametrize("encoding", PACK)
def test_plain_and_compressed_messages_share_a_stream_wherever_it_is_cut(encoding: str) -> None:
    packed = PACK[encoding](TEXT)
    stream = message(TEXT) + message(packed, COMPRESSED) + message(b"") + message(b"", COMPRESSED)
    for chunks in cuts(stream, 2):
        assert fed(chunks, encoding) == [TEXT, TEXT, b"", b""], chunks


def test_a_message_is_extracted_with_its_last_chunk() -> None:
    deframer = Deframer(IDENTITY, LIMIT)
    for byte in message(TEXT)[:-1]:
        assert not deframer.feed(bytes([byte]))
    assert deframer.feed(message(TEXT)[-1:] + message(b"x") + b"\0") == [TEXT, b"x"]


def test_parts_of_every_size_are_put_together_in_their_order() -> None:
    sizes = [1, SMALL_BYTES, 2, SMALL_BYTES - 1, 3, 0, SMALL_BYTES + 1, 4, 5]
    parts = [bytes([number]) * size for number, size in enumerate(sizes)]
    chunks = [HEAD.pack(PLAIN, sum(sizes)), *parts]
    assert fed(chunks, limit=sum(sizes)) == [b"".join(parts)]


def test_a_message_in_tiny_chunks_takes_little_more_memory_than_its_size() -> None:
    size, step = 1 << 20, 16
    deframer = Deframer(IDENTITY, size)
    deframer.feed(HEAD.pack(PLAIN, size))
    tracemalloc.start()
    try:
        for _ in range(size // step - 1):
            deframer.feed(bytes(step))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.5 * size


def test_empty_chunks_are_not_stored() -> None:
    deframer = Deframer(IDENTITY, LIMIT)
    deframer.feed(message(TEXT)[:7])
    tracemalloc.start()
    try:
        for _ in range(10_000):
            deframer.feed(b"")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 10_000
    assert deframer.feed(message(TEXT)[7:]) == [TEXT]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_message_may_have_as_many_bytes_as_the_limit_says(parts: int) -> None:
    for chunks in cuts(message(b"x" * LIMIT), parts):
        assert fed(chunks) == [b"x" * LIMIT]


@pytest.mark.parametrize("size", [LIMIT + 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("flag", [PLAIN, COMPRESSED])
def test_a_message_beyond_the_limit_is_refused_once_its_size_is_known(size: int, flag: int) -> None:
    for chunks in cuts(HEAD.pack(flag, size), 2):
        assert failing(chunks, "gzip") == (
            StatusCode.RESOURCE_EXHAUSTED,
            f"a message of {size} bytes is larger than the limit of {LIMIT} bytes",
        )


def test_a_message_beyond_the_limit_is_refused_if_it_is_whole_in_a_chunk() -> None:
    assert failing([message(b"x" * (LIMIT + 1))])[0] is StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("encoding", PACK)
def test_a_decompressed_message_has_at_most_as_many_bytes_as_the_limit_says(encoding: str) -> None:
    fitting, larger = (PACK[encoding](b"x" * size) for size in (LIMIT, LIMIT + 1))
    assert fed([message(fitting, COMPRESSED)], encoding) == [b"x" * LIMIT]
    assert failing([message(larger, COMPRESSED)], encoding) == (
        StatusCode.RESOURCE_EXHAUSTED,
        f"a decompressed message is larger than the limit of {LIMIT} bytes",
    )


@pytest.mark.parametrize("encoding", PACK)
def test_a_decompression_bomb_takes_no_more_memory_than_the_limit(encoding: str) -> None:
    limit = 1 << 20
    bomb = message(PACK[encoding](bytes(100 * limit)), COMPRESSED)
    deframer = Deframer(encoding, limit)
    tracemalloc.start()
    try:
        with pytest.raises(RpcError, match="a decompressed message is larger"):
            deframer.feed(bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * limit


@pytest.mark.parametrize("encoding", [IDENTITY, *PACK])
def test_a_flag_is_0_or_1(encoding: str) -> None:
    for flag in range(2, 256):
        assert failing([message(TEXT, flag)], encoding) == (
            StatusCode.INTERNAL,
            f"a message has the flag {flag}, expected 0 or 1",
        )


def test_a_compressed_message_needs_an_encoding() -> None:
    for chunks in cuts(message(gzip.compress(TEXT), COMPRESSED), 2):
        assert failing(chunks) == (
            StatusCode.INTERNAL,
            "a message is compressed, and 'grpc-encoding' does not say how",
        )


@pytest.mark.parametrize("encoding", ["snappy", "GZIP", "", "gzip,identity", "x" * 1000])
def test_an_unknown_encoding_is_refused_with_the_known_ones(encoding: str) -> None:
    with pytest.raises(RpcError) as caught:
        Deframer(encoding, LIMIT)
    assert caught.value.status is StatusCode.UNIMPLEMENTED
    assert f"'{encoding[:64]}', expected one of {ACCEPTED}" in caught.value.details
    assert len(caught.value.details) < 200


@pytest.mark.parametrize("encoding", PACK)
def test_incomplete_or_trailing_compressed_data_are_refused(encoding: str) -> None:
    packed = PACK[encoding](TEXT)
    wrong = [packed[:size] for size in range(1, len(packed))]
    wrong += [packed + b"x", packed + packed, b"garbage", bytes(20), packed[2:]]
    wrong += [pack(TEXT) for other, pack in PACK.items() if other != encoding]
    for data in wrong:
        assert failing([message(data, COMPRESSED)], encoding) == (
            StatusCode.INTERNAL,
            f"a message is not in the form of {encoding}",
        ), data


@pytest.mark.parametrize("encoding", PACK)
def test_a_checksum_that_is_wrong_is_noticed(encoding: str) -> None:
    packed = bytearray(PACK[encoding](TEXT))
    packed[-5 if encoding == "gzip" else -1] ^= 1
    assert failing([message(bytes(packed), COMPRESSED)], encoding)[0] is StatusCode.INTERNAL


def test_the_end_of_a_stream_within_a_message_is_an_error() -> None:
    data = message(TEXT)
    for size in range(1, len(data)):
        status, details = failing([data[:size]])
        wanted = HEAD.size if size < HEAD.size else len(data)
        assert status is StatusCode.INTERNAL
        assert details == f"the stream ended within a message: {size} bytes came of {wanted}"


@pytest.mark.parametrize("encoding", PACK)
@pytest.mark.parametrize(("input_bytes", "part_bytes"), [(1, 1), (3, 2), (7, 100), (1000, 3)])
def test_a_message_is_decompressed_in_parts(
    monkeypatch: pytest.MonkeyPatch, encoding: str, input_bytes: int, part_bytes: int
) -> None:
    monkeypatch.setattr(http2_wire, "INPUT_BYTES", input_bytes)
    monkeypatch.setattr(http2_wire, "PART_BYTES", part_bytes)
    for text in (b"", b"a", TEXT, b"x" * 90, random.Random(1).randbytes(40)):
        packed = PACK[encoding](text)
        assert fed([message(packed, COMPRESSED)], encoding) == [text]
        for damaged in (packed[:-1], packed + b"x", packed + packed[:9], packed[:5]):
            assert failing([message(damaged, COMPRESSED)], encoding)[0] is StatusCode.INTERNAL
    too_large = message(PACK[encoding](bytes(LIMIT + 1)), COMPRESSED)
    assert failing([too_large], encoding)[0] is StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("encoding", PACK)
def test_a_message_has_a_limited_ratio(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    monkeypatch.setattr(client_limits, "FREE_BYTES", 1 << 20)
    limit, mebibyte = 1 << 25, 1 << 20
    assert fed([message(PACK[encoding](bytes(mebibyte)), COMPRESSED)], encoding, limit) == [
        bytes(mebibyte)
    ]
    packed = PACK[encoding](bytes(mebibyte + 1))
    assert failing([message(packed, COMPRESSED)], encoding, limit) == (
        StatusCode.RESOURCE_EXHAUSTED,
        f"a message of {len(packed)} bytes in {encoding} has more than 1048576 bytes of data, "
        "expected at most 100 for each byte, or 1048576; send it uncompressed",
    )
    dense = random.Random(1).randbytes(mebibyte // 8) + bytes(8 * mebibyte)
    assert fed([message(PACK[encoding](dense), COMPRESSED)], encoding, limit) == [dense]


def test_a_stream_may_end_before_any_message_and_behind_each() -> None:
    assert fed([]) == fed([b""]) == []
    assert fed([message(TEXT), message(TEXT)]) == [TEXT, TEXT]


def test_a_chunk_that_may_become_large_is_not_quick() -> None:
    small = bytes(QUICK_BYTES)
    assert Deframer(IDENTITY, LIMIT).quick(bytes(1 << 20))
    deframer = Deframer("gzip", 1 << 20)
    assert deframer.quick(small)
    assert not deframer.quick(small + b"x")
    deframer.feed(message(bytes(10), COMPRESSED)[:-1])
    assert not deframer.quick(small)
    assert deframer.quick(small[14:])


def test_messages_that_are_sent_can_be_read() -> None:
    assert fed(framed(SENT)) == SENT
    assert [fed(framed((each,))) for each in SENT] == [[each] for each in SENT]


def test_a_large_message_is_sent_as_it_is() -> None:
    large = bytes(COPIED_BYTES + 1)
    head, sent = framed((large,))
    assert sent is large
    assert fed([head, sent], limit=len(large)) == [large]
    assert len(framed((large[1:],))) == 1


def test_a_partial_message_does_not_keep_earlier_ones_in_memory() -> None:
    chunk = message(bytes(1 << 20)) + message(bytes(2 * SMALL_BYTES))[:-1]
    tracemalloc.start()
    try:
        deframer = Deframer(IDENTITY, 1 << 20)
        assert len(deframer.feed(bytes(bytearray(chunk)))) == 1
        assert tracemalloc.get_traced_memory()[0] < 1 << 19
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", PACK)
@pytest.mark.parametrize("level", [1, 9])
def test_compressed_messages_that_are_sent_can_be_read(encoding: str, level: int) -> None:
    sent = [*SENT, b"x" * LIMIT]
    stream = compressed(sent, encoding, level)
    assert fed([stream], encoding) == sent
    assert len(stream) < sum(map(len, framed(sent)))


LEVELS = (CompressionLevel.LOW, CompressionLevel.MEDIUM, CompressionLevel.HIGH)

THREADS = request_threads()


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        # As a real Triton.
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
async def test_messages_are_the_same_once_they_are_decompressed(encoding: str, size: int) -> None:
    messages = [b"a" * size, bytes(range(256)), b""]
    sent = await compressed_in_thread(messages, encoding, THREADS)
    assert list(Deframer(encoding, 1 << 30).feed(sent)) == messages


async def test_a_message_that_would_not_shrink_is_not_compressed() -> None:
    sent = await compressed_in_thread([bytes(range(256)), b"a" * 256], "deflate", THREADS)
    assert sent.startswith(struct.pack(">BL", 0, 256) + bytes(range(256)))
    flag, size = struct.unpack_from(">BL", sent, 5 + 256)
    assert (flag, size < 256) == (1, True)


async def test_the_forms_are_those_of_their_names() -> None:
    data = b"a" * 1000
    assert gzip.decompress((await compressed_in_thread([data], "gzip", THREADS))[5:]) == data
    assert zlib.decompress((await compressed_in_thread([data], "deflate", THREADS))[5:]) == data
