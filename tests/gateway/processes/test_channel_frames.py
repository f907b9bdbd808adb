"""Frames of channels: encoding, and decoding of any chunks."""

import itertools
import tracemalloc
from collections.abc import Iterable

import pytest

from gateway.processes.channel import (
    HEAD,
    NO_CALL,
    Frame,
    FrameDecoder,
    FrameKind,
    headed,
    number,
    packed,
    read_headed,
    read_number,
)

LARGEST = (1 << 32) - 1

SENT = [
    Frame(FrameKind.PING, NO_CALL, b""),
    Frame(FrameKind.DATA, 1, b"a"),
    Frame(FrameKind.END, 1, b""),
    Frame(FrameKind.DATA, LARGEST, bytes(9)),
    Frame(FrameKind.TAKEN, 2, b"the end"),
]

STREAM = b"".join(packed(kind, call, payload) for kind, call, payload in SENT)


def fed(chunks: Iterable[bytes]) -> list[Frame]:
    """All frames of a stream of these chunks."""
    reader = FrameDecoder()
    return [frame for chunk in chunks for frame in reader.feed(chunk)]


def cuts(data: bytes, parts: int) -> Iterable[list[bytes]]:
    """The data cut into `parts` chunks in every possible way; some are empty."""
    for borders in itertools.combinations_with_replacement(range(len(data) + 1), parts - 1):
        edges = (0, *borders, len(data))
        yield [data[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_frames_are_the_same_wherever_the_stream_is_cut(parts: int) -> None:
    for chunks in cuts(STREAM, parts):
        assert fed(chunks) == SENT, chunks


@pytest.mark.parametrize("size", range(1, 20))
def test_frames_are_the_same_in_chunks_of_one_size(size: int) -> None:
    assert fed(STREAM[at : at + size] for at in range(0, len(STREAM), size)) == SENT


def test_a_frame_is_decoded_with_its_last_chunk() -> None:
    reader = FrameDecoder()
    whole = packed(FrameKind.DATA, 7, b"whole")
    for byte in whole[:-1]:
        assert list(reader.feed(bytes([byte]))) == []
    found = list(reader.feed(whole[-1:] + packed(FrameKind.END, 7) + b"\0"))
    assert found == [(FrameKind.DATA, 7, b"whole"), (FrameKind.END, 7, b"")]


def test_a_large_frame_among_small_ones_is_put_together() -> None:
    payload = bytes(range(256)) * 4096
    stream = (
        packed(FrameKind.END, 1) + packed(FrameKind.DATA, 2, payload) + packed(FrameKind.END, 2)
    )
    found = fed(stream[at : at + 1000] for at in range(0, len(stream), 1000))
    assert found == [(FrameKind.END, 1, b""), (FrameKind.DATA, 2, payload), (FrameKind.END, 2, b"")]


def test_payloads_are_bytes_whether_or_not_they_were_held() -> None:
    for chunks in cuts(packed(FrameKind.DATA, 1, b"payload"), 2):
        assert [type(frame.payload) for frame in fed(chunks)] == [bytes]


def test_decoded_frames_are_not_kept() -> None:
    size = 1 << 20
    whole = packed(FrameKind.DATA, 1, bytes(size))
    reader = FrameDecoder()
    tracemalloc.start()
    try:
        for part in (whole[:size], whole[size:]):
            assert sum(1 for _ in reader.feed(part)) == (len(part) < size)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < size // 2


def test_a_head_says_length_kind_and_call_in_nine_bytes() -> None:
    assert HEAD.size == 9
    assert packed(FrameKind.DATA, 0x01020304, b"xyz") == b"\3\0\0\0\0\4\3\2\1xyz"


@pytest.mark.parametrize("head", [None, 0, [], {"a": [1, "é", None]}, "\0", [["n", "\xff"]]])
@pytest.mark.parametrize("rest", [b"", b"\0\xff", b'{"not": "json', bytes(100_000)])
def test_a_headed_payload_gives_its_head_and_the_bytes_behind_it(head: object, rest: bytes) -> None:
    assert read_headed(headed(head, rest)) == (head, rest)


@pytest.mark.parametrize("value", [0, 1, 255, 1 << 16, LARGEST])
def test_numbers_are_read_as_they_were_written(value: int) -> None:
    assert read_number(number(value)) == value
