"""The event loop polls only between requests in quick succession."""

import asyncio
import time

import pytest

from gateway import event_loop, process_limits
from gateway.event_loop import BusyPoll, busy_poll

pytestmark = pytest.mark.quiet

SPAN_US = 100_000
SPAN_SECS = SPAN_US / 1e6


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "processors", lambda: 2)
    monkeypatch.setattr(process_limits, "quota", lambda: None)


async def is_awake(secs: float) -> bool:
    """Whether this thread computes without a request."""
    began, used = time.perf_counter(), time.thread_time()
    await asyncio.sleep(secs)
    return (time.thread_time() - used) / (time.perf_counter() - began) > 0.2


def polling(span_us: int = SPAN_US) -> BusyPoll:
    made = busy_poll(span_us)
    assert made is not None
    return made


def ask(polling: BusyPoll) -> None:
    polling.began()
    polling.ended()


async def test_the_loop_polls_after_two_requests_in_quick_succession() -> None:
    poll = polling()
    ask(poll)
    assert not await is_awake(SPAN_SECS / 10)  # nothing is known yet
    ask(poll)
    assert await is_awake(SPAN_SECS / 2)


async def test_it_sleeps_after_a_request_to_another_process() -> None:
    poll = polling()
    for _ in range(3):
        poll.began()
        poll.ended(polls=False)
    assert not await is_awake(SPAN_SECS / 2)


async def test_it_sleeps_again_after_its_span() -> None:
    poll = polling()
    ask(poll)
    ask(poll)
    await asyncio.sleep(2 * SPAN_SECS)
    assert not await is_awake(SPAN_SECS)
    ask(poll)  # late: the next is not expected soon
    assert not await is_awake(SPAN_SECS / 2)


async def test_it_sleeps_while_a_request_is_in_flight() -> None:
    poll = polling()
    poll.began()
    ask(poll)
    ask(poll)
    assert not await is_awake(SPAN_SECS / 2)


@pytest.mark.parametrize("reason", ["switched off", "one processor", "half of two"])
def test_it_never_polls(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    if reason == "one processor":
        monkeypatch.setattr(event_loop, "processors", lambda: 1)
    if reason == "half of two":
        monkeypatch.setattr(process_limits, "quota", lambda: 1.0)
    assert busy_poll(0 if reason == "switched off" else SPAN_US) is None


async def test_a_request_in_flight_ends_the_polling() -> None:
    poll = polling()
    ask(poll)
    ask(poll)
    poll.began()
    assert not await is_awake(SPAN_SECS / 2)
    poll.ended()
    assert await is_awake(SPAN_SECS / 2)
