"""Frames: cut from the bytes of a socket, whole or not."""

import pytest

from backends.python.worker.sluice_worker.protocol import PREFIX, BrokenFrame, FrameSplitter, frame

FRAMES = [(b"[1]", b""), (b"[2,3]", b"body"), (b"[]", bytes(1000))]
STREAM = b"".join(frame(header, [body]) for header, body in FRAMES)


@pytest.mark.parametrize("size", [1, 2, 7, 13, 500, len(STREAM)])
def test_frames_are_found_wherever_the_stream_is_cut(size: int) -> None:
    reader = FrameSplitter()
    found = [
        (header, bytes(body))
        for start in range(0, len(STREAM), size)
        for header, body in reader.feed(STREAM[start : start + size])
    ]
    assert found == FRAMES


def test_several_buffers_are_one_body() -> None:
    ((header, body),) = FrameSplitter().feed(frame(b"{}", [b"ab", memoryview(b"cd")]))
    assert (header, bytes(body)) == (b"{}", b"abcd")


@pytest.mark.parametrize("sizes", [((64 << 20) + 1, 0), (0, (1 << 34) + 1)])
def test_bytes_that_are_no_frame_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(BrokenFrame):
        list(FrameSplitter().feed(PREFIX.pack(*sizes)))
