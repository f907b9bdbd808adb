"""An alarm calls back once, not before its time, and soon after."""

import asyncio
import time

import pytest

from gateway.schedulers.scheduler import Timer
from tests.builders import soon
from tests.gateway.schedulers.queues import MS


@pytest.mark.parametrize("after_ms", [-1, 0, 0.2, 1, 3.5])
async def test_a_timer_calls_back_at_its_time(after_ms: float) -> None:
    rang = asyncio.Event()
    alarm = Timer(rang.set)
    at_ns = time.monotonic_ns() + int(after_ms * MS)
    alarm.set(at_ns)
    assert alarm.is_set
    await soon(rang.wait())
    assert time.monotonic_ns() >= at_ns
    assert not alarm.is_set


@pytest.mark.parametrize("after_ms", [0.2, 3.5])
async def test_a_timer_that_may_be_late_takes_no_turn_after_the_other(
    after_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rang, waits, wait = asyncio.Event(), list[int](), Timer._wait  # noqa: SLF001 - counted

    def counted(timer: Timer) -> None:
        waits.append(time.monotonic_ns())
        wait(timer)

    monkeypatch.setattr(Timer, "_wait", counted)
    timer = Timer(rang.set, late=True)
    at_ns = time.monotonic_ns() + int(after_ms * MS)
    timer.set(at_ns)
    await soon(rang.wait())
    assert time.monotonic_ns() >= at_ns
    assert len(waits) <= 2


async def test_the_earliest_time_counts_and_it_rings_once() -> None:
    rang: list[int] = []
    ringing = asyncio.Event()

    def ring() -> None:
        rang.append(time.monotonic_ns())
        ringing.set()

    alarm = Timer(ring)
    now_ns = time.monotonic_ns()
    alarm.set(now_ns + 10_000 * MS)
    alarm.set(now_ns + 2 * MS)
    alarm.set(now_ns + 3 * MS)
    await soon(ringing.wait())
    assert len(rang) == 1
    assert rang[0] >= now_ns + 2 * MS
    assert not alarm.is_set


async def test_a_cleared_alarm_does_not_ring_and_can_be_set_again() -> None:
    rang = asyncio.Event()
    alarm = Timer(rang.set)
    alarm.clear()
    alarm.set(time.monotonic_ns())
    alarm.clear()
    await asyncio.sleep(0)
    assert not rang.is_set()
    alarm.set(time.monotonic_ns())
    await soon(rang.wait())
