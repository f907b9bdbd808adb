"""The deadline of a connection: it expires once, for time in which bytes were due."""

import asyncio
import time

import pytest

from gateway import client_limits
from gateway.client_limits import PACE_BYTES
from gateway.frontends.http.connection_parts import HELD_SECS, ClientDeadline, Owed
from gateway.settings import HttpTimeLimits
from tests.builders import soon

SECS = 0.02
LIMITS = HttpTimeLimits(head_secs=SECS, body_idle_secs=5 * SECS, connection_idle_secs=0)


class Debtor:
    """A client whose debt the test decides."""

    def __init__(self, owed: Owed, limits: HttpTimeLimits = LIMITS) -> None:
        loop = asyncio.get_running_loop()
        self.owed = owed
        self.expired: asyncio.Future[tuple[Owed, float]] = loop.create_future()
        self.deadline = ClientDeadline(
            loop, limits, lambda: self.owed, lambda *found: self.expired.set_result(found)
        )

    async def after(self, secs: float) -> bool:
        """Whether the deadline has expired that much later."""
        await asyncio.wait((self.expired,), timeout=secs)
        return self.expired.done()


@pytest.mark.parametrize(("owed", "secs"), [(Owed.HEAD, SECS), (Owed.BODY, 5 * SECS)])
async def test_each_debt_has_its_own_limit(owed: Owed, secs: float) -> None:
    began = time.monotonic()
    assert await soon(Debtor(owed).expired) == (owed, secs)
    assert time.monotonic() - began > secs - 0.005


@pytest.mark.parametrize("owed", [Owed.NOTHING, Owed.REQUEST])
async def test_a_debt_without_a_limit_never_expires(owed: Owed) -> None:
    debtor = Debtor(owed)
    assert not await debtor.after(10 * SECS)
    debtor.owed = Owed.HEAD
    assert await soon(debtor.expired) == (Owed.HEAD, SECS)


async def test_without_limits_nothing_expires() -> None:
    limits = HttpTimeLimits(head_secs=0, body_idle_secs=0, connection_idle_secs=0)
    assert not await Debtor(Owed.HEAD, limits).after(5 * SECS)


async def test_a_restart_begins_the_time_anew() -> None:
    debtor = Debtor(Owed.BODY)
    began = time.monotonic()
    while time.monotonic() - began < 10 * SECS:
        debtor.deadline.since = asyncio.get_running_loop().time()
        assert not await debtor.after(SECS)
    assert await debtor.after(10 * SECS)


async def test_a_body_keeps_the_pace_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause is longer than the limit of pauses."""
    monkeypatch.setattr(client_limits, "PACE_AFTER_SECS", 10 * SECS)
    debtor = Debtor(Owed.BODY)
    began = time.monotonic()
    debtor.deadline.take_body(int(5 * SECS * PACE_BYTES), begins=True)
    while not await debtor.after(SECS):
        debtor.deadline.take_body(1, begins=False)
    assert time.monotonic() - began > 14.5 * SECS
    assert debtor.expired.result() == (Owed.BODY, 5 * SECS)


async def test_the_pace_of_a_body_is_measured_from_its_own_first_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_limits, "PACE_AFTER_SECS", 10 * SECS)
    debtor = Debtor(Owed.BODY)
    for _ in range(30):
        debtor.deadline.take_body(1, begins=True)
        assert not await debtor.after(SECS)


async def test_time_without_a_debt_does_not_count_for_the_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_limits, "PACE_AFTER_SECS", 10 * SECS)
    debtor = Debtor(Owed.BODY)
    debtor.deadline.take_body(1, begins=True)
    debtor.owed = Owed.NOTHING
    assert not await debtor.after(20 * SECS)
    debtor.owed = Owed.BODY
    debtor.deadline.take_body(1, begins=False)
    assert not await debtor.after(3 * SECS)


async def test_a_cancelled_deadline_never_expires() -> None:
    debtor = Debtor(Owed.HEAD)
    debtor.deadline.cancel()
    assert not await debtor.after(5 * SECS)


async def test_bytes_that_came_while_the_loop_was_held_are_in_time() -> None:
    debtor = Debtor(Owed.HEAD)
    time.sleep(2 * SECS + HELD_SECS)  # noqa: ASYNC251 - the held loop is the matter of the test
    assert not await debtor.after(SECS)
    debtor.owed = Owed.NOTHING
    assert not await debtor.after(HELD_SECS + 5 * SECS)


async def test_a_held_loop_saves_no_client_that_sends_nothing() -> None:
    debtor = Debtor(Owed.HEAD)
    time.sleep(2 * SECS + HELD_SECS)  # noqa: ASYNC251 - the held loop is the matter of the test
    assert await soon(debtor.expired) == (Owed.HEAD, SECS)
