"""The addresses of replicas on Ray, from a child process that the test plays."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence, Set
from pathlib import Path

import pytest

from gateway.fleet import ray_addresses
from gateway.fleet.ray_addresses import (
    Correspondent,
    RayFleet,
    RayQuestion,
    RayTable,
    from_ray,
)
from gateway.fleet.ray_news import ModelNews, OffersByModel, RouterNews
from tests.builders import TEXT
from tests.gateway.fleet.fake_replica import offered

CHILD = "tests.gateway.fleet.fake_directory"
WITHIN_SECS = 30.0

pytestmark = pytest.mark.usefixtures("no_pause")


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_addresses, "FIRST_PAUSE_SECS", 0.0)


class Router:
    """A router with the same news at all times."""

    def __init__(self, news: RouterNews = RouterNews()) -> None:  # noqa: B008 - frozen
        self._news = news
        self.models: list[Mapping[str, ModelNews]] = []
        self.offers: list[OffersByModel] = []

    def take_news(self, models: Mapping[str, ModelNews], offers: OffersByModel) -> None:
        self.models.append(models)
        self.offers.append(offers)

    def news(self) -> RouterNews:
        return self._news


async def taken(
    tables: AsyncGenerator[RayTable, None], count: int
) -> list[tuple[tuple[str, int], ...]]:
    found = []
    async with asyncio.timeout(WITHIN_SECS):
        async for each in tables:
            found.append(each.replicas)
            if len(found) == count:
                break
    await tables.aclose()
    return found


async def test_a_child_process_is_restarted_and_makes_the_controller_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        found = await taken(from_ray(RayFleet("f"), Router(), CHILD), 3)
    assert found == [(("made", 1),), (("made", 1), ("f", 2)), (("found", 1),)]
    said = [
        (each.message, vars(each).get("model"), vars(each)["reason"]) for each in caplog.records
    ]
    assert said == [
        ("replicas missing", "m", "no node has 8 GPU"),
        ("replicas not known", None, f"{CHILD} ended with status 0"),
        ("replicas missing", "m", "no node has 8 GPU"),
    ]


async def test_the_reason_of_a_child_process_is_logged_and_the_last_table_holds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        found = await taken(from_ray(RayFleet("f", ("--fails=yes",)), Router(), CHILD), 3)
    assert found[2] == (("found", 1),)
    assert [vars(each)["reason"] for each in caplog.records] == ["GCS gone"]


async def test_a_child_process_hears_the_news_of_the_router_and_tells_those_of_the_controller() -> (
    None
):
    news = RouterNews({"m": 0.01}, {"n": (offered(TEXT),)})
    router = Router(news)
    await taken(from_ray(RayFleet("f", ("--hears=yes",)), router, CHILD), 3)
    assert router.models == [{}, {}, {"m": ModelNews("needs 0.01")}]
    assert router.offers == [{}, {}, news.offers]


async def test_a_child_process_that_ends_within_a_line_is_restarted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        found = await taken(from_ray(RayFleet("f", ("--ends=within a line",)), Router(), CHILD), 3)
    assert found[2] == (("found", 1),)
    assert [vars(each)["reason"] for each in caplog.records] == [f"{CHILD} ended with status 0"]


async def test_a_table_that_cannot_be_read_is_a_reason_and_the_last_one_holds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        found = await taken(from_ray(RayFleet("f", ("--garbles=yes",)), Router(), CHILD), 3)
    assert found[2] == (("found", 1),)
    (reason,) = [vars(each)["reason"] for each in caplog.records]
    assert reason.startswith(f"the table of {CHILD} cannot be read: Expected `int`, got `str`")


async def test_the_controller_is_made_again_in_a_restarted_cluster(tmp_path: Path) -> None:
    file = tmp_path / "clusters"
    file.write_text("one\ntwo")
    found = await taken(from_ray(RayFleet("f", (f"--clusters={file}",)), Router(), CHILD), 3)
    assert [found[0], found[2]] == [(("made", 1),)] * 2


ONE, TWO = RayTable(cluster="one"), RayTable(cluster="two")
LOST = RayTable(reason="GCS gone")
SLOW = RayTable(reason="no decision for 15 s", cluster="one")
DOWN = RayTable(reason="no controller", cluster="one", is_ended=True)


@pytest.mark.parametrize(
    ("tables", "makes"),
    [
        ([], {"one", "two"}),
        ([ONE], {"two"}),
        ([ONE, LOST], {"two"}),
        ([ONE, TWO], {"one"}),
        ([ONE, DOWN, LOST], set()),
        ([ONE, DOWN, ONE], {"two"}),
        ([SLOW], {"two"}),
        ([ONE, DOWN, SLOW], set()),
    ],
    ids=[
        *("new", "known", "lost", "restarted", "ended", "ended-and-made-by-another-router"),
        *("made-and-silent", "ended-and-silent"),
    ],
)
def test_a_router_makes_no_controller_where_it_knew_one_or_after_the_end_of_the_fleet(
    tables: Sequence[RayTable], makes: Set[str]
) -> None:
    question = RayQuestion(RayFleet("f"))
    for each in tables:
        question = question.after(each)
    assert {each for each in ("one", "two") if question.makes_controller(each)} == makes


async def test_the_pauses_of_a_child_process_without_addresses_grow_to_half_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def sleep(secs: float) -> None:
        pauses.append(secs)

    async def tables(
        module: str, question: bytes, router: Correspondent
    ) -> AsyncGenerator[RayTable, None]:
        has_addresses = len(pauses) in (6, 7)
        yield RayTable(replicas=(("r", 1),)) if has_addresses else RayTable(reason="GCS gone")

    monkeypatch.setattr(ray_addresses, "FIRST_PAUSE_SECS", 2.0)
    monkeypatch.setattr(ray_addresses, "_tables", tables)
    monkeypatch.setattr(ray_addresses.asyncio, "sleep", sleep)
    await taken(from_ray(RayFleet("f"), Router()), 2)
    assert pauses == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 2.0]
