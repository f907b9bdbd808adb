"""Requests for a model without replicas wait in the router for the first one."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError, RetryLater
from gateway.fleet import connection, waiting
from gateway.fleet.choice import ReplicaState
from gateway.fleet.offers import Offers
from gateway.fleet.ray_news import ModelNews, RouterNews, described
from gateway.frontends.http import sse
from gateway.frontends.http.app import build_app
from gateway.frontends.http.keep_alive import silence_comment
from gateway.settings import HttpSettings
from gateway.stream import ResponseStream
from tests.builders import TEXT, settle, soon, text_request
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.in_one_loop import SETTINGS, metrics
from tests.gateway.fleet.routing import Routed, routing, text
from tests.gateway.fleet.test_status import OF_TEXT

ZERO = replace(TEXT, parameters={"replicas": "0..4", "max_in_flight": "3"})
KEY = ("text", 1)


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 0.005)
    monkeypatch.setattr(connection, "LONGEST_PAUSE_SECS", 0.01)
    monkeypatch.setattr(waiting, "LOOK_SECS", 60.0)


class Fleet:
    """A router whose only replica comes and goes."""

    def __init__(self, routed: Routed, replica: FakeReplica) -> None:
        self.router, self.dataplane = routed
        self.replica = replica
        self.dataplane.fleet = self.router

    def infer(self, words: str = "hello", **fields: int) -> ResponseStream:
        return self.dataplane.infer(text_request(words, **fields))

    async def goes(self) -> None:
        """Wait until the router has no replica that takes requests."""
        self.replica.offer(offered(ZERO), state=ReplicaState.DRAINING)
        await until(lambda: not self.router.connections[0].serves(KEY))

    def comes(self) -> None:
        self.replica.offer(offered(ZERO))

    @property
    def waiting(self) -> int:
        (model,) = self.router.describe()["models"]
        found: int = model["waiting"]
        return found

    async def answer(self, count: int = 1) -> list[str]:
        """Answer as many requests of the replica; their texts, in the order in which they came."""
        await until(lambda: len(self.replica.calls) >= count)
        calls, self.replica.calls[:] = self.replica.calls[:], []
        for each in calls:
            self.replica.answer(each, "hello")
        requests = [self.replica.requests[each] for each in calls]
        return [each.inputs[0].elements()[0].decode() for each in requests]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """A fleet without a replica that takes requests."""
    async with listening() as replica:
        replica.offer(offered(ZERO))
        async with routing(tmp_path, replica) as routed:
            found = Fleet(routed, replica)
            await found.goes()
            yield found


async def refused(stream: ResponseStream) -> InferenceError:
    with pytest.raises(InferenceError) as caught, stream:
        await soon(stream.only())
    return caught.value


async def test_requests_wait_for_a_replica_and_are_sent_in_their_order(fleet: Fleet) -> None:
    await fleet.dataplane.model("text").check_ready()
    with fleet.infer("a") as first, fleet.infer("b") as second:
        assert (fleet.waiting, fleet.replica.calls) == (2, [])
        fleet.comes()
        assert await fleet.answer(2) == ["a", "b"]
        assert fleet.waiting == 0
        for each in (first, second):
            assert text(await soon(each.only())) == b"hello"
    found = await metrics(fleet.dataplane)
    assert found[f"gateway_fleet_cold_starts_total{{{OF_TEXT}}}"] == 1
    assert 0 < found[f"gateway_fleet_expected_start_seconds{{{OF_TEXT}}}"] < 10


async def test_a_lost_replica_that_comes_again_gets_the_requests_that_wait(fleet: Fleet) -> None:
    fleet.replica.offers = Offers(ReplicaState.READY, fleet.replica.offers.models)
    fleet.replica.lose()
    await until(lambda: fleet.router.connections[0].state is None)
    with fleet.infer() as stream:
        assert await fleet.answer() == ["hello"]
        assert text(await soon(stream.only())) == b"hello"


async def test_a_silent_replica_that_is_back_gets_the_requests_that_wait(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENT_SECS", -1.0)
    monkeypatch.setattr(waiting, "LOOK_SECS", 0.01)
    fleet.comes()
    await until(lambda: fleet.router.connections[0].state is ReplicaState.READY)
    with fleet.infer():
        assert fleet.waiting == 1
        monkeypatch.setattr(connection, "SILENT_SECS", 60.0)
        assert await fleet.answer() == ["hello"]


async def test_a_request_that_was_sent_does_not_end_at_the_limit_of_its_wait(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting.WaitingRoom, "_limit", 0.2)
    with fleet.infer() as stream:
        fleet.comes()
        await until(lambda: bool(fleet.replica.calls))
        await asyncio.sleep(0.2)
        await fleet.answer()
        assert text(await soon(stream.only())) == b"hello"


async def test_a_client_that_leaves_while_it_waits_leaves_no_request(fleet: Fleet) -> None:
    with fleet.infer("a"), fleet.infer("b") as second:
        with fleet.infer("c"):
            assert fleet.waiting == 3
        assert fleet.waiting == 2
        second.cancel()
        assert fleet.waiting == 1
        fleet.comes()
        assert await fleet.answer() == ["a"]
    assert fleet.dataplane.in_flight == 0


async def test_more_requests_than_the_model_accepts_are_refused(fleet: Fleet) -> None:
    with fleet.infer(), fleet.infer(), fleet.infer():
        error = await refused(fleet.infer())
    assert isinstance(error, RetryLater)
    assert error.message == (
        "model 'text' has no replica; one is being started, and 3 requests wait for it, the most "
        "that may ('max_in_flight')"
    )


async def test_a_request_waits_for_its_timeout_at_most(fleet: Fleet) -> None:
    error = await refused(fleet.infer(timeout_us=10_000))
    assert (error.code, error.message) == (
        Code.UNAVAILABLE,
        "Request timeout expired: model 'text' has no replica yet",
    )
    assert fleet.waiting == 0


async def test_a_request_waits_for_the_limit_of_its_model_at_most(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting.WaitingRoom, "_limit", 0.01)
    error = await refused(fleet.infer())
    assert isinstance(error, RetryLater)
    assert "a request waits for 0.01 s at most" in error.message


def started(fleet: Fleet, secs: float) -> None:
    """Let the router have seen a start of that length."""
    fleet.router._placed[KEY].instance.counts.started(secs)  # noqa: SLF001 - no start takes a minute


async def test_a_request_without_the_time_for_a_start_is_refused_and_asks_for_one(
    fleet: Fleet,
) -> None:
    started(fleet, 39.95)
    with fleet.infer(timeout_us=60_000_000):
        assert fleet.waiting == 1
    error = await refused(fleet.infer(timeout_us=10_000_000))
    assert isinstance(error, RetryLater)
    assert error.secs == 40
    assert error.message == (
        "model 'text' has no replica; one is being started, expected in about 40 s"
    )
    assert fleet.router.news().needs == {"text": 0.01}
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hello"]}
    body = {"inputs": [tensor], "parameters": {"timeout": 10_000_000}}
    answer = await post(fleet.dataplane, "/v2/models/text/infer", body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "40")
    assert answer.json()["error"] == error.message
    started(fleet, 2000)
    body = {"text_input": "hello"}
    answer = await post(fleet.dataplane, "/v2/models/text/generate_stream", body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1020")


async def test_a_stream_says_when_its_replica_is_expected(fleet: Fleet) -> None:
    loop = asyncio.get_running_loop()
    with fleet.infer() as stream:
        assert stream.replica_at == math.inf
    started(fleet, 60)
    with fleet.infer() as stream:
        assert 50 < (stream.replica_at or 0) - loop.time() < 61
        fleet.comes()
        await fleet.answer()
        assert stream.replica_at is None


async def test_a_stream_of_events_has_comments_while_it_waits(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    comments: list[bytes] = []

    def commented(replica_at: float | None) -> bytes:
        comments.append(silence_comment(replica_at))
        return comments[-1]

    monkeypatch.setattr(sse, "silence_comment", commented)
    body, http = {"text_input": "hello"}, HttpSettings(first_response_secs=0, keep_alive_secs=0.01)
    path = "/v2/models/text/generate_stream"
    posted = asyncio.ensure_future(post(fleet.dataplane, path, body, http))
    await until(lambda: bool(comments))
    fleet.comes()
    await fleet.answer()
    answer = await soon(posted)
    assert answer.status_code == 200
    assert answer.content.startswith(b": waiting for a replica\n\n")
    assert b'"text_output":"hello"' in answer.content


async def post(
    dataplane: DataPlane,
    path: str,
    body: Mapping[str, object],
    settings: HttpSettings = SETTINGS.http,
) -> httpx.Response:
    transport = httpx.ASGITransport(build_app(dataplane, settings, "triton"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await soon(client.post(path, json=body))


async def test_the_router_needs_a_replica_while_a_request_waits(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = f"gateway_fleet_need{{{OF_TEXT}}}"
    monkeypatch.setattr(waiting, "used_secs", lambda rules: 0.0)
    assert (await metrics(fleet.dataplane))[need] == 0
    with fleet.infer():
        found = await metrics(fleet.dataplane)
        assert (found[need], found[f"gateway_fleet_waiting{{{OF_TEXT}}}"]) == (0.01, 1)
        assert fleet.router.news() == RouterNews({"text": 0.01})
    assert fleet.router.news() == RouterNews()


# On Ray: the controller says which models have replicas to come.


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


async def test_requests_wait_on_when_the_configuration_changes(fleet: Fleet) -> None:
    changed = replace(ZERO, parameters={**ZERO.parameters, "number": "2"})
    with fleet.infer() as stream:
        fleet.replica.offer(offered(changed))
        assert await fleet.answer() == ["hello"]
        assert text(await soon(stream.only())) == b"hello"
    assert fleet.dataplane.model("text").config == changed


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
