"""The watch over the event loop."""

import asyncio
import logging
import threading
import time

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
    with LoopWatch(blocked_secs=0.2):
        hold_the_loop(2.0)
        await soon(asyncio.to_thread(wait_until, lambda: bool(lines(caplog)), BLOCKED))
    found = [record for record in lines(caplog) if record.__dict__["ms"] >= 1000]
    assert len(found) == 1
    assert "hold_the_loop" in found[0].__dict__["stack"].split("<")[0]


async def test_a_loop_that_waits_is_not_blocked(caplog: pytest.LogCaptureFixture) -> None:
    answers = threading.Event()
    with LoopWatch(blocked_secs=10.0):
        await soon(asyncio.to_thread(answers.wait, 1.0))
    assert not lines(caplog)


async def test_the_watch_ends_with_its_block() -> None:
    with LoopWatch():
        assert any(thread.name == "loop-watch" for thread in threading.enumerate())
    assert not any(thread.name == "loop-watch" for thread in threading.enumerate())
