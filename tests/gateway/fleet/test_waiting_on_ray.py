"""Requests for a model without replicas on Ray, where the controller says which may come."""

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.errors import Code, InferenceError
from gateway.fleet.ray_news import ModelNews, RouterNews, described
from tests.builders import settle, soon
from tests.gateway.fleet.fake_replica import listening, offered, until
from tests.gateway.fleet.routing import routing, text
from tests.gateway.fleet.waiting_fleet import ZERO, Fleet, refused

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
    changed = replace(ZERO, parameters={**ZERO.parameters, "number": "2"})
    fleet.replica.offer()
    await until(lambda: not fleet.router.connections[0].models)
    with fleet.infer() as stream:
        fleet.router.take_news({"text": ModelNews()}, {"text": (offered(changed),)})
        assert fleet.dataplane.model("text").config == changed
        assert fleet.waiting == 1
        await settle()  # the model runs
        fleet.router.take_news({"text": ModelNews()}, {"text": (offered(changed, 2),)})
        assert fleet.dataplane.model("text").version == "2"
        assert "version 1 has been replaced" in (await refused(stream)).message
    await settle()  # the model runs
