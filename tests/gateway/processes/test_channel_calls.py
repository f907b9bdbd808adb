"""Windows of calls: limits, and reports of passed-on bytes."""

import asyncio

import pytest

from gateway.processes.windows import (
    FRAME_BYTES,
    REPORTED_BYTES,
    WINDOW_BYTES,
    ReceiveWindow,
    SendWindow,
)
from tests.builders import settle, soon

FULL = WINDOW_BYTES - FRAME_BYTES
"""The bytes of a frame that fills the window."""

TOLD = REPORTED_BYTES - FRAME_BYTES
"""The bytes of a frame that is reported at once."""


async def test_there_is_room_until_the_window_is_full() -> None:
    window = SendWindow()
    window.sent(FULL - 1)
    assert window.has_room
    await soon(window.room())
    window.sent(1)
    assert not window.has_room


async def test_a_blocked_sender_continues_when_the_window_has_room() -> None:
    window = SendWindow()
    window.sent(FULL)
    waiting = asyncio.create_task(window.room())
    await settle()
    assert not waiting.done()
    window.taken(1)
    await soon(waiting)


async def test_a_piece_above_the_window_blocks_the_next_one() -> None:
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


async def test_a_woken_sender_waits_again_if_the_window_is_full() -> None:
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


async def test_a_cancelled_waiter_does_not_block_the_next_one() -> None:
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


async def test_every_waiting_task_continues() -> None:
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


def test_small_amounts_are_not_reported() -> None:
    receipts = ReceiveWindow()
    assert receipts.add(TOLD - 1) == 0
    assert receipts.add(0) == REPORTED_BYTES - 1 + FRAME_BYTES


def test_reported_bytes_are_not_reported_again() -> None:
    receipts = ReceiveWindow()
    assert receipts.add(TOLD + 5) == REPORTED_BYTES + 5
    assert receipts.add(TOLD - 1) == 0


@pytest.mark.parametrize("size", [1000, REPORTED_BYTES - 1, REPORTED_BYTES, 5 * WINDOW_BYTES])
def test_unreported_bytes_never_fill_the_window(size: int) -> None:
    window, receipts = SendWindow(), ReceiveWindow()
    for _ in range(2 * WINDOW_BYTES // size + 2):
        window.sent(size)
        if told := receipts.add(size):
            window.taken(told)
        assert window.has_room
