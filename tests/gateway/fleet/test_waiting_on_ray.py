"""Requests for a model without replicas on Ray, where the controller says which may come."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from gateway.errors import Code, InferenceError
from gateway.fleet.directory import Listing
from gateway.fleet.ray_news import ModelNews, RouterNews, described, router_news
from tests.builders import settle, soon
from tests.gateway.fleet.fake_replica import listening, offered, until
from tests.gateway.fleet.routing import routing, text
from tests.gateway.fleet.waiting_fleet import CHANGED, KEY, ZERO, Fleet, refused

pytestmark = pytest.mark.usefixtures("short_times")


async def test_a_start_that_fails_ends_the_requests_that_wait_with_the_reason(
    fleet: Fleet,
) -> None:
    fleet.router.take_news({"text": ModelNews()}, {})
    reason = "no node has 8 GPU with zone=a"
    with fleet.infer() as first, fleet.infer() as second:
        assert fleet.waiting == 2
        fleet.router.take_news({"text": ModelNews(refusal=reason)}, {})
        for each in (first, second):
            error = await refused(each)
            assert error.code is Code.UNAVAILABLE
            assert error.message == f"model 'text' has no replica, and none can start: {reason}"
    assert reason in (await refused(fleet.infer())).message
    with pytest.raises(InferenceError, match="has no replica that takes requests"):
        await fleet.dataplane.model("text").check_ready()
    assert fleet.router.describe()["models"][0]["reason"] == reason
    fleet.router.take_news({"text": ModelNews()}, {})
    await fleet.dataplane.model("text").check_ready()


async def test_a_model_that_the_controller_does_not_have_has_no_replica_to_come(
    fleet: Fleet,
) -> None:
    fleet.router.take_news({}, {})
    assert "it is DRAINING" in (await refused(fleet.infer())).message


async def test_a_router_that_never_saw_a_replica_serves_the_offers_of_the_controller(
    tmp_path: Path,
) -> None:
    offer = offered(ZERO)
    async with listening() as replica, routing(tmp_path, replica) as routed:
        fleet = Fleet(routed, replica)
        fleet.router.take_news({"text": ModelNews()}, {"text": (offer,)})
        assert fleet.router.news() == RouterNews()
        with fleet.infer() as stream:
            await until(lambda: fleet.waiting == 1)
            fleet.comes()
            await fleet.answer()
            assert text(await soon(stream.only())) == b"hello"
        # The controller lacks it, as after a restart.
        assert fleet.router.news().offers == {"text": (offer,)}
        fleet.router.take_news({"text": ModelNews(known=described([offer]))}, {})
        assert fleet.router.news().offers == {}


async def test_the_newer_offer_of_the_controller_replaces_that_of_a_model_without_replicas(
    fleet: Fleet,
) -> None:
    fleet.replica.offer()
    await until(lambda: not fleet.router.connections[0].models)
    with fleet.infer() as stream:
        fleet.router.take_news({"text": ModelNews()}, {"text": (offered(CHANGED),)})
        assert fleet.dataplane.model("text").config == CHANGED
        assert fleet.waiting == 1
        await settle()  # the model runs
        fleet.router.take_news({"text": ModelNews()}, {"text": (offered(CHANGED, 2),)})
        assert fleet.dataplane.model("text").version == "2"
        assert "version 1 has been replaced" in (await refused(stream)).message
    await settle()  # the model runs


def test_of_several_offers_of_a_version_that_of_the_latest_load_is_reported() -> None:
    """All routers agree, so that they do not replace the offers of one another again and again."""
    old, new, other = (
        msgspec.structs.replace(offered(config, version), loaded_at=at)
        for config, version, at in ((ZERO, 1, 5.0), (CHANGED, 1, 6.0), (ZERO, 2, 1.0))
    )
    model = ModelNews(known=described([old]), description="new")
    for offers in ([new, other, old], [old, new, other]):
        found = router_news({}, {"text": model}, offers)
        assert found.offers == {"text": (new, other)}
        assert found.descriptions == {"text": "new"}
        known = ModelNews(known=described([new, other]))
        assert router_news({}, {"text": known}, offers) == RouterNews()


async def test_offers_of_an_earlier_description_are_not_reported(fleet: Fleet) -> None:
    fleet.comes()
    fleet.router.take_news({"text": ModelNews(description="new")}, {})
    await until(lambda: fleet.router.connections[0].serves(KEY))
    assert fleet.router.news().descriptions == {"text": "new"}
    address = ("127.0.0.1", fleet.replica.port)
    async with asyncio.TaskGroup() as tasks:
        fleet.router._follow(Listing((address,), frozenset({address})), tasks)  # noqa: SLF001
    assert fleet.router.news() == RouterNews()
