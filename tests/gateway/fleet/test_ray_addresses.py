"""The addresses of replicas on Ray, from a child process that the test plays."""

import asyncio
import logging
from collections.abc import AsyncGenerator

import pytest

from gateway.fleet import ray_addresses
from gateway.fleet.ray_addresses import RayFleet, from_ray

CHILD = "tests.gateway.fleet.fake_directory"
WITHIN_SECS = 30.0

pytestmark = pytest.mark.usefixtures("no_pause")


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_addresses, "PAUSE_SECS", 0.0)


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
