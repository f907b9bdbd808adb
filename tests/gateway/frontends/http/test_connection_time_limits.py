"""The deadline of a connection: it expires once, for time in which bytes were due."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway import client_limits
from gateway.client_limits import PACE_BYTES
from gateway.frontends.http.connection_parts import HELD_SECS, ClientDeadline, Owed
from gateway.settings import HttpTimeLimits

SECS = 0.02
LIMITS = HttpTimeLimits(head_secs=SECS, body_idle_secs=5 * SECS, connection_idle_secs=0)


class Timer:
    """One timer of a `Clock`."""

    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        """See `asyncio.TimerHandle`."""
        self.is_cancelled = True


class Clock:
    """The time of a loop, which the test decides, and its timers."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._timers: list[Timer] = []

    def time(self) -> float:
        """See `asyncio.AbstractEventLoop`."""
        return self._now

    def call_later(self, secs: float, callback: Callable[[], None]) -> Timer:
        """See `asyncio.AbstractEventLoop`."""
        self._timers.append(Timer(self._now + secs, callback))
        return self._timers[-1]

    def run(self, secs: float) -> None:
        """Run for that long; each timer fires in time."""
        ends_at = self._now + secs
        while (first := min(self._timers, key=lambda each: each.due, default=None)) is not None:
            if first.due > ends_at:
                break
            self._timers.remove(first)
            self._now = max(self._now, first.due)
            if not first.is_cancelled:
                first.callback()
        self._now = ends_at

    def hold(self, secs: float) -> None:
        """Fire no timer for that long, and then those that are late."""
        self._now += secs
        self.run(0)


class Debtor:
    """A client whose debt the test decides."""

    def __init__(self, owed: Owed, limits: HttpTimeLimits = LIMITS) -> None:
        self.owed = owed
        self.expired: list[tuple[Owed, float]] = []
        self.clock: Any = Clock()
        self.deadline = ClientDeadline(
            self.clock, limits, lambda: self.owed, lambda *found: self.expired.append(found)
        )

    def after(self, secs: float) -> bool:
        """Whether the deadline has expired that much later."""
        self.clock.run(secs)
        return bool(self.expired)


@pytest.mark.parametrize(("owed", "secs"), [(Owed.HEAD, SECS), (Owed.BODY, 5 * SECS)])
def test_each_debt_has_its_own_limit(owed: Owed, secs: float) -> None:
    debtor = Debtor(owed)
    assert not debtor.after(secs - 0.001)
    assert debtor.after(0.002)
    assert debtor.expired == [(owed, secs)]


@pytest.mark.parametrize("owed", [Owed.NOTHING, Owed.REQUEST])
def test_a_debt_without_a_limit_never_expires(owed: Owed) -> None:
    debtor = Debtor(owed)
    assert not debtor.after(10 * SECS)
    debtor.owed = Owed.HEAD
    assert debtor.after(3 * SECS)
    assert debtor.expired == [(Owed.HEAD, SECS)]


def test_without_limits_nothing_expires() -> None:
    limits = HttpTimeLimits(head_secs=0, body_idle_secs=0, connection_idle_secs=0)
    assert not Debtor(Owed.HEAD, limits).after(5 * SECS)


def test_a_restart_begins_the_time_anew() -> None:
    debtor = Debtor(Owed.BODY)
    for _ in range(10):
        debtor.deadline.since = debtor.clock.time()
        assert not debtor.after(SECS)
    assert debtor.after(10 * SECS)


def test_a_body_keeps_the_pace_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause is longer than the limit of pauses."""
    monkeypatch.setattr(client_limits, "PACE_AFTER_SECS", 10 * SECS)
    debtor = Debtor(Owed.BODY)
    began = debtor.clock.time()
    debtor.deadline.take_body(int(5 * SECS * PACE_BYTES), begins=True)
    while not debtor.after(SECS):
        assert debtor.clock.time() - began < 100 * SECS
        debtor.deadline.take_body(1, begins=False)
    assert debtor.clock.time() - began > 14.5 * SECS
    assert debtor.expired == [(Owed.BODY, 5 * SECS)]


def test_the_pace_of_a_body_is_measured_from_its_own_first_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_limits, "PACE_AFTER_SECS", 10 * SECS)
    debtor = Debtor(Owed.BODY)
    for _ in range(30):
        debtor.deadline.take_body(1, begins=True)
        assert not debtor.after(SECS)


def test_time_without_a_debt_does_not_count_for_the_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_limits, "PACE_AFTER_SECS", 10 * SECS)
    debtor = Debtor(Owed.BODY)
    debtor.deadline.take_body(1, begins=True)
    debtor.owed = Owed.NOTHING
    assert not debtor.after(20 * SECS)
    debtor.owed = Owed.BODY
    debtor.deadline.take_body(1, begins=False)
    assert not debtor.after(3 * SECS)


def test_a_cancelled_deadline_never_expires() -> None:
    debtor = Debtor(Owed.HEAD)
    debtor.deadline.cancel()
    assert not debtor.after(5 * SECS)


def test_bytes_that_came_while_the_loop_was_held_are_in_time() -> None:
    debtor = Debtor(Owed.HEAD)
    debtor.clock.hold(2 * SECS + HELD_SECS)
    assert not debtor.after(SECS)
    debtor.owed = Owed.NOTHING
    assert not debtor.after(HELD_SECS + 5 * SECS)


def test_a_held_loop_saves_no_client_that_sends_nothing() -> None:
    debtor = Debtor(Owed.HEAD)
    debtor.clock.hold(2 * SECS + HELD_SECS)
    assert debtor.after(HELD_SECS + SECS)
    assert debtor.expired == [(Owed.HEAD, SECS)]
