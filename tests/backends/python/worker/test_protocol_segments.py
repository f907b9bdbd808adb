"""Segments: placed once, read in place, used again, and let go."""

import socket
from collections.abc import Iterator

import pytest

from backends.python.worker.sluice_worker.protocol import (
    IDLE_BYTES,
    SHARED_FROM_BYTES,
    IncomingSegments,
    OutgoingSegments,
)

Ends = tuple[OutgoingSegments, IncomingSegments]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both ends of a pair of sockets."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    outgoing = OutgoingSegments(ours)
    yield outgoing, IncomingSegments(theirs)
    outgoing.close()
    ours.close()
    theirs.close()


def test_a_placed_tensor_is_read_at_the_other_end(ends: Ends) -> None:
    outgoing, incoming = ends
    data = bytes(range(256)) * 512
    number = outgoing.place(memoryview(data))
    assert bytes(incoming.view(number, len(data))) == data


def test_a_segment_is_reused_after_its_last_view(ends: Ends) -> None:
    outgoing, incoming = ends
    first = outgoing.place(memoryview(bytes(100_000)))
    view = incoming.view(first, 100_000)
    part = view[10:20]
    del view
    assert incoming.take_released() == []
    del part
    assert incoming.take_released() == [first]
    outgoing.freed([first])
    assert outgoing.place(memoryview(bytes(SHARED_FROM_BYTES + 1))) == first
    assert outgoing.place(memoryview(bytes(SHARED_FROM_BYTES + 1))) != first


def test_a_segment_that_was_not_sent_is_refused(ends: Ends) -> None:
    with pytest.raises(BlockingIOError):
        ends[1].view(9, 1)


def test_more_than_a_segment_has_is_refused(ends: Ends) -> None:
    outgoing, incoming = ends
    number = outgoing.place(memoryview(bytes(SHARED_FROM_BYTES)))
    with pytest.raises(ValueError, match="expected 1000000"):
        incoming.view(number, 1_000_000)


def test_beyond_a_limit_idle_segments_are_dropped(ends: Ends) -> None:
    outgoing, incoming = ends
    size = IDLE_BYTES // 2 + 1
    numbers = [outgoing.place(memoryview(bytes(size))) for _ in range(2)]
    outgoing.freed(numbers)
    # Rounded up to a power of two, one of them is all that may rest.
    assert outgoing.take_dropped() == [numbers[1]]
    incoming.drop(numbers)
