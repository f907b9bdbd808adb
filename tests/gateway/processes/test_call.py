"""What is under way is bounded, and what has been passed on is told in time."""

import asyncio

import pytest

from gateway.processes.call import (
    FRAME_BYTES,
    REPORTED_BYTES,
    WINDOW_BYTES,
    ReceiveWindow,
    SendWindow,
)
from tests.builders import settle, soon

FULL = WINDOW_BYTES - FRAME_BYTES
"""A frame of so many bytes fills the window."""

TOLD = REPORTED_BYTES - FRAME_BYTES
"""One of so many is told at once."""


async def test_there_is_room_until_the_window_is_full() -> None:
    window = SendWindow()
    window.sent(FULL - 1)
    assert window.has_room
    await soon(window.room())
    window.sent(1)
    assert not window.has_room


async def test_who_waits_for_room_goes_on_when_some_is_given_back() -> None:
    window = SendWindow()
    window.sent(FULL)
    waiting = asyncio.create_task(window.room())
    await settle()
    assert not waiting.done()
    window.taken(1)
    await soon(waiting)


async def test_a_piece_larger_than_the_window_holds_back_what_follows_it() -> None:
    window = SendWindow()
    window.sent(3 * WINDOW_BYTES)
    waiting = asyncio.create_task(window.room())
    await settle()
    window.taken(2 * WINDOW_BYTES)
    await settle()
    assert not waiting.done()
    window.taken(FRAME_BYTES + 1)
    await soon(waiting)


async def test_a_closed_window_has_room_for_ever() -> None:
    window = SendWindow()
    window.sent(FULL)
    waiting = asyncio.create_task(window.room())
    await settle()
    window.close()
    await soon(waiting)
    window.sent(FULL)
    assert window.has_room
    await soon(window.room())


async def test_room_that_is_gone_before_it_is_used_is_waited_for_again() -> None:
    window = SendWindow()
    window.sent(FULL)
    waiting = asyncio.create_task(window.room())
    await settle()
    window.taken(1)
    window.sent(1)
    await settle()
    assert not waiting.done()
    window.taken(FRAME_BYTES + 1)
    await soon(waiting)


async def test_the_next_may_wait_when_one_that_waited_was_cancelled() -> None:
    window = SendWindow()
    window.sent(FULL)
    one = asyncio.create_task(window.room())
    await settle()
    one.cancel()
    await soon(asyncio.wait([one]))
    other = asyncio.create_task(window.room())
    await settle()
    window.taken(1)
    await soon(other)


async def test_all_who_wait_go_on() -> None:
    window = SendWindow()
    window.sent(FULL)
    waiting = [asyncio.create_task(window.room()) for _ in range(2)]
    await settle()
    window.taken(1)
    await soon(asyncio.gather(*waiting))


def test_frames_without_a_byte_fill_the_window_as_well() -> None:
    window = SendWindow()
    for _ in range(WINDOW_BYTES // FRAME_BYTES):
        window.sent(0)
    assert not window.has_room


def test_nothing_is_told_before_it_is_worth_a_frame() -> None:
    receipts = ReceiveWindow()
    assert receipts.add(TOLD - 1) == 0
    assert receipts.add(0) == REPORTED_BYTES - 1 + FRAME_BYTES


def test_what_was_told_is_not_told_again() -> None:
    receipts = ReceiveWindow()
    assert receipts.add(TOLD + 5) == REPORTED_BYTES + 5
    assert receipts.add(TOLD - 1) == 0


@pytest.mark.parametrize("size", [1000, REPORTED_BYTES - 1, REPORTED_BYTES, 5 * WINDOW_BYTES])
def test_what_is_not_told_leaves_room_in_the_window(size: int) -> None:
    window, receipts = SendWindow(), ReceiveWindow()
    for _ in range(2 * WINDOW_BYTES // size + 2):
        window.sent(size)
        if told := receipts.add(size):
            window.taken(told)
        assert window.has_room
