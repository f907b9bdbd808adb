"""The addresses of replicas on Ray, from a child process that the test plays."""

import asyncio
import logging
from collections.abc import AsyncGenerator

import pytest

from gateway.fleet import ray_addresses
from gateway.fleet.ray_addresses import RayFleet, RayTable, from_ray

CHILD = "tests.gateway.fleet.fake_directory"
WITHIN_SECS = 30.0

pytestmark = pytest.mark.usefixtures("no_pause")


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_addresses, "FIRST_PAUSE_SECS", 0.0)


async def taken(
    tables: AsyncGenerator[tuple[tuple[str, int], ...], None], count: int
) -> list[tuple[tuple[str, int], ...]]:
    found = []
    async with asyncio.timeout(WITHIN_SECS):
        async for each in tables:
            found.append(each)
            if len(found) == count:
                break
    await tables.aclose()
    return found


async def test_a_child_process_is_restarted_and_makes_the_controller_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        found = await taken(from_ray(RayFleet("f"), CHILD), 3)
    assert found == [(("made", 1),), (("made", 1), ("f", 2)), (("found", 1),)]
    said = [
        (each.message, vars(each).get("model"), vars(each)["reason"]) for each in caplog.records
    ]
    assert said == [
        ("replicas lack", "m", "no node has 8 GPU"),
        ("replicas not known", None, f"{CHILD} ended with status 0"),
        ("replicas lack", "m", "no node has 8 GPU"),
    ]


async def test_the_reason_of_a_child_process_is_logged_and_the_last_table_holds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        found = await taken(from_ray(RayFleet("f", ("--fails=yes",)), CHILD), 3)
    assert found[2] == (("found", 1),)
    assert [vars(each)["reason"] for each in caplog.records] == ["GCS gone"]


async def test_a_child_process_that_ends_within_a_line_is_restarted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        found = await taken(from_ray(RayFleet("f", ("--ends=within a line",)), CHILD), 3)
    assert found[2] == (("found", 1),)
    assert [vars(each)["reason"] for each in caplog.records] == [f"{CHILD} ended with status 0"]


async def test_the_pauses_of_a_child_process_without_addresses_grow_to_half_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def sleep(secs: float) -> None:
        pauses.append(secs)

    async def tables(module: str, question: bytes) -> AsyncGenerator[RayTable, None]:
        has_addresses = len(pauses) in (6, 7)
        yield RayTable(replicas=(("r", 1),)) if has_addresses else RayTable(reason="GCS gone")

    monkeypatch.setattr(ray_addresses, "FIRST_PAUSE_SECS", 2.0)
    monkeypatch.setattr(ray_addresses, "_tables", tables)
    monkeypatch.setattr(ray_addresses.asyncio, "sleep", sleep)
    await taken(from_ray(RayFleet("f")), 2)
    assert pauses == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 2.0]
