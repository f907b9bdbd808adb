"""The watch over the event loop."""

import asyncio
import logging
import threading
import time
import weakref

import pytest

from gateway.event_loop import LoopWatch
from tests.builders import soon
from tests.serving import wait_until

BLOCKED = "event loop blocked"


def hold_the_loop(secs: float) -> None:
    time.sleep(secs)


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.getMessage() == BLOCKED]


async def test_a_blocked_loop_is_logged_once_with_its_stack(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LoopWatch(blocked_secs=0.2, log_secs=0):
        hold_the_loop(2.0)
        await soon(asyncio.to_thread(wait_until, lambda: bool(lines(caplog)), BLOCKED))
    found = [record for record in lines(caplog) if record.__dict__["ms"] >= 1000]
    assert len(found) == 1
    assert "hold_the_loop" in found[0].__dict__["stack"].split("<")[0]


class Body:
    """Stands for a large request."""


def handle_slowly(body: Body) -> "weakref.ref[Body]":
    hold_the_loop(0.5)
    return weakref.ref(body)


async def test_what_a_blocked_function_had_is_freed_when_it_returns() -> None:
    with LoopWatch(blocked_secs=0.1):
        body = handle_slowly(Body())
        assert body() is None


async def block_often() -> None:
    for secs in (0.3, 0.3, 0.9, 0.3):
        hold_the_loop(secs)
        await asyncio.sleep(0.06)


async def test_blocks_and_the_longest_delay_are_counted() -> None:
    with LoopWatch(blocked_secs=0.2, log_secs=600) as watch:
        await block_often()
        assert watch.reading.blocks >= 3
        assert 0.8 <= watch.reading.longest_secs <= watch.reading.blocked_secs


async def test_a_delay_below_the_limit_is_no_block() -> None:
    with LoopWatch(blocked_secs=10.0) as watch:
        hold_the_loop(0.2)
        await asyncio.sleep(0.1)
        assert watch.reading.longest_secs > 0.1
        assert watch.reading[:2] == (0, 0.0)


async def test_many_blocks_make_two_lines_and_the_second_has_the_longest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LoopWatch(blocked_secs=0.2, log_secs=600):
        await block_often()
        assert len(lines(caplog)) == 1
    first, second = (record.__dict__ for record in lines(caplog))
    assert first["count"] == 1
    assert second["count"] >= 3
    assert second["ms"] >= 850
    assert "hold_the_loop" in second["stack"].split("<")[0]


async def test_counted_blocks_are_logged_when_the_time_between_two_lines_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LoopWatch(blocked_secs=0.2, log_secs=2.0):
        await block_often()

        def all_are_logged() -> bool:
            return sum(record.__dict__["count"] for record in lines(caplog)) >= 4

        await soon(asyncio.to_thread(wait_until, all_are_logged, BLOCKED))


async def test_a_loop_that_waits_is_not_blocked(caplog: pytest.LogCaptureFixture) -> None:
    answers = threading.Event()
    with LoopWatch(blocked_secs=10.0):
        await soon(asyncio.to_thread(answers.wait, 1.0))
    assert not lines(caplog)


async def test_the_watch_ends_with_its_block() -> None:
    with LoopWatch():
        assert any(thread.name == "loop-watch" for thread in threading.enumerate())
    assert not any(thread.name == "loop-watch" for thread in threading.enumerate())
