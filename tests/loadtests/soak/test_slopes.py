"""Lines through readings of a server, and the tables that it reads."""

import asyncio
import random

import pytest

from gateway.resumption.recordings import Recordings
from loadtests.soak.inside import tables
from loadtests.soak.slopes import (
    LEAST_SECS,
    MEMORY,
    MIB,
    TASKS,
    Reading,
    few,
    growing,
    line,
    panels,
    rows,
    second_half,
)
from loadtests.soak.soak import _ended

EVERY_SECS = 30.0
UNREAD = "the server could not be read"
COUNT = int(LEAST_SECS / EVERY_SECS) * 2


def readings(**growth: float) -> list[Reading]:
    """Readings that grow by these amounts in ten minutes, with noise of one unit."""
    chance = random.Random(7)
    found = []
    for number in range(COUNT + 1):
        secs = number * EVERY_SECS
        counts = {
            name: 1000 + per_ten_minutes * secs / 600 + chance.random()
            for name, per_ten_minutes in growth.items()
        }
        found.append(Reading(secs, counts))
    return found


def last(found: list[Reading]) -> dict[str, float]:
    return dict(found[-1].counts)


def test_a_line_has_the_slope_of_its_values() -> None:
    found = line([0, 1, 2, 3], [1, 3, 5, 7])
    assert (found.per_sec, found.mean) == (2, 4)
    assert found.error == pytest.approx(0)
    assert found.per_ten_minutes == 1200


def test_a_table_that_grows_and_keeps_what_has_ended_is_a_leak() -> None:
    found = readings(a=10, b=0)
    grown = f"{rows(found)['a'].split()[0][1:]} more in ten minutes"
    assert growing(found, last(found)) == [f"a: {grown}, {last(found)['a']:,.0f} without clients"]


def test_a_table_that_varies_is_none() -> None:
    chance = random.Random(5)
    found = [Reading(each.secs, {"a": chance.randrange(1000)}) for each in readings(a=0)]
    assert second_half(found)["a"].per_ten_minutes > 100
    assert growing(found, {"a": 1000}) == []


def test_a_table_that_is_empty_without_clients_is_none() -> None:
    found = readings(a=10)
    assert growing(found, {"a": 0}) == []


@pytest.mark.parametrize(("entries", "leaks"), [(9_000, False), (11_000, True)])
def test_a_cache_may_grow_up_to_its_bound(entries: int, leaks: bool) -> None:
    found = readings(**{"LocalCache._entries": 100})
    assert bool(growing(found, {"LocalCache._entries": entries})) is leaks


def test_a_table_that_grew_in_the_first_half_alone_is_none() -> None:
    found = readings(a=0)
    early = [Reading(each.secs, {"a": min(each.secs, 300.0)}) for each in found]
    assert growing(early, {"a": 300.0}) == []


@pytest.mark.parametrize(("mib", "leaks"), [(0.5, False), (1.5, True)])
def test_memory_may_grow_by_a_mebibyte_in_ten_minutes(mib: float, leaks: bool) -> None:
    found = readings(**{MEMORY: mib * MIB})
    assert bool(growing(found, last(found))) is leaks


def test_the_memory_of_a_short_run_is_not_judged() -> None:
    found = [Reading(each.secs / 10, each.counts) for each in readings(**{MEMORY: 100 * MIB})]
    assert growing(found, last(found)) == []


def test_few_readings_have_no_line() -> None:
    found = readings(a=10)[:8]
    assert second_half(found) == {}
    assert few(found) == ["4 readings in the second half, expected at least 5"]
    assert few([]) == ["0 readings in the second half, expected at least 5"]
    assert few(readings(a=10)) == []
    assert growing(found, last(found)) == []
    assert [each.name for each in panels(found)][-1] == TASKS


async def test_an_error_ends_the_readings_and_the_run_has_it() -> None:
    async def reading(error: Exception | None) -> None:
        if error is not None:
            raise error
        await asyncio.Event().wait()

    for error, found in ((None, []), (OSError("gone"), [f"{UNREAD}: OSError('gone')"])):
        task = asyncio.create_task(reading(error))
        await asyncio.sleep(0)
        assert await _ended(task) == found


async def test_the_tables_of_objects_and_of_modules_are_read() -> None:
    before = tables()
    kept = Recordings()
    kept.leak = {number: number for number in range(7)}  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    after = tables()
    assert after["Recordings.leak"] - before.get("Recordings.leak", 0) == 7
    assert after["Recordings objects"] - before.get("Recordings objects", 0) == 1
    assert after["gateway.policy.areas.AREA_OF_ROUTE"] > 50
