"""The event loop polls only between requests in quick succession."""

import asyncio
import time

import pytest

from gateway import cpus
from gateway.models import busy_poll as module
from gateway.models.busy_poll import BusyPoll

pytestmark = pytest.mark.quiet

SPAN_US = 100_000
SPAN_SECS = SPAN_US / 1e6


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "processors", lambda: 2)
    monkeypatch.setattr(cpus, "quota", lambda: None)


async def is_awake(secs: float) -> bool:
    """Whether this thread computes without a request."""
    began, used = time.perf_counter(), time.thread_time()
    await asyncio.sleep(secs)
    return (time.thread_time() - used) / (time.perf_counter() - began) > 0.2


def ask(busy_poll: BusyPoll) -> None:
    busy_poll.began()
    busy_poll.ended()


async def test_the_loop_polls_after_two_requests_in_quick_succession() -> None:
    busy_poll = BusyPoll(SPAN_US)
    ask(busy_poll)
    assert not await is_awake(SPAN_SECS / 10)  # nothing is known yet
    ask(busy_poll)
    assert await is_awake(SPAN_SECS / 2)


async def test_it_sleeps_again_after_its_span() -> None:
    busy_poll = BusyPoll(SPAN_US)
    ask(busy_poll)
    ask(busy_poll)
    await asyncio.sleep(2 * SPAN_SECS)
    assert not await is_awake(SPAN_SECS)
    ask(busy_poll)  # late: the next is not expected soon
    assert not await is_awake(SPAN_SECS / 2)


@pytest.mark.parametrize("prepare", ["in flight", "switched off", "one processor", "half of two"])
async def test_it_never_stays_awake(monkeypatch: pytest.MonkeyPatch, prepare: str) -> None:
    if prepare == "one processor":
        monkeypatch.setattr(module, "processors", lambda: 1)
    if prepare == "half of two":
        monkeypatch.setattr(cpus, "quota", lambda: 1.0)
    busy_poll = BusyPoll(0 if prepare == "switched off" else SPAN_US)
    if prepare == "in flight":
        busy_poll.began()
    ask(busy_poll)
    ask(busy_poll)
    assert not await is_awake(SPAN_SECS / 2)


async def test_a_request_in_flight_ends_the_polling() -> None:
    busy_poll = BusyPoll(SPAN_US)
    ask(busy_poll)
    ask(busy_poll)
    busy_poll.began()
    assert not await is_awake(SPAN_SECS / 2)
    busy_poll.ended()
    assert await is_awake(SPAN_SECS / 2)
