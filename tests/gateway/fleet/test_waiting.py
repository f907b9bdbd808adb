"""Requests for a model without replicas wait in the router for the first one."""

import asyncio
import math
import time
from collections.abc import Mapping

import httpx
import pytest

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError, RefusedError, RetryLater, no_instance
from gateway.fleet import connection, waiting
from gateway.fleet.choice import ReplicaState
from gateway.fleet.offers import Offers
from gateway.fleet.ray_news import RouterNews
from gateway.frontends.http import sse
from gateway.frontends.http.app import build_app
from gateway.frontends.http.keep_alive import silence_comment
from gateway.messages import SequenceTag
from gateway.settings import HttpSettings
from tests.builders import soon
from tests.gateway.fleet.fake_replica import offered, until
from tests.gateway.fleet.in_one_loop import SETTINGS, metrics
from tests.gateway.fleet.routing import text
from tests.gateway.fleet.test_status import OF_TEXT
from tests.gateway.fleet.waiting_fleet import CHANGED, ZERO, Clock, Fleet, refused

pytestmark = pytest.mark.usefixtures("short_times")


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


async def test_a_request_that_its_only_replica_has_no_room_for_does_not_wait_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be sent, and refused, again and again, while others wait behind it."""
    with fleet.infer("a") as first:
        fleet.comes()
        await until(lambda: bool(fleet.replica.calls))
        monkeypatch.setattr(fleet.room, "takes", lambda waiter: True)
        fleet.replica.fail(fleet.replica.calls.pop(), RetryLater("it is full"))
        assert (await refused(first)).message == "it is full"


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
    fleet: Fleet,
) -> None:
    with fleet.infer() as stream:
        timer = fleet.timer
        assert not timer.cancelled()
        fleet.comes()
        await fleet.answer()
        assert timer.cancelled()
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


async def test_requests_are_sent_in_several_turns_and_later_ones_behind_them(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "MOST_AT_ONCE", 1)
    with fleet.infer("a"), fleet.infer("b"), fleet.infer("c"):
        fleet.comes()
        while fleet.waiting == 3:  # noqa: ASYNC110 - it is seen between two turns
            await asyncio.sleep(0)
        left = fleet.waiting
        assert left > 0
        with fleet.infer("d"):
            assert fleet.waiting == left + 1
            assert await fleet.answer(4) == ["a", "b", "c", "d"]


async def test_a_sequence_continues_at_its_draining_replica_without_a_wait(fleet: Fleet) -> None:
    fleet.comes()
    with fleet.infer("one", sequence=SequenceTag(7, start=True)):
        await fleet.answer()
    await fleet.goes()
    with fleet.infer("two", sequence=SequenceTag(7)):
        assert fleet.waiting == 0
        assert await fleet.answer() == ["two"]
    with fleet.infer("another one", sequence=SequenceTag(8)):
        assert fleet.waiting == 1


@pytest.mark.parametrize(
    ("state", "trouble", "error"),
    [
        (ReplicaState.DRAINING, "", RefusedError(Code.UNAVAILABLE, "it exits")),
        (ReplicaState.READY, "its instance has died", no_instance("its instance has died")),
    ],
    ids=["drains", "has no instance"],
)
async def test_a_request_that_the_last_replica_refuses_waits_for_the_next_one(
    fleet: Fleet, state: ReplicaState, trouble: str, error: InferenceError
) -> None:
    fleet.comes()
    with fleet.infer() as stream:
        await until(lambda: bool(fleet.replica.calls))
        fleet.replica.offer(offered(ZERO, trouble=trouble), state=state)
        fleet.replica.fail(fleet.replica.calls.pop(), error)
        await until(lambda: fleet.waiting == 1)
        fleet.comes()
        assert await fleet.answer() == ["hello"]
        assert text(await soon(stream.only())) == b"hello"


@pytest.mark.parametrize(("pause_secs", "learned"), [(300, 40), (30, 70)])
async def test_the_expected_start_begins_with_the_first_request_that_asks_for_it(
    fleet: Fleet, clock: Clock, pause_secs: float, learned: float
) -> None:
    with fleet.infer():
        """Its client leaves at once, and the model is needed for a minute."""
    clock.now += pause_secs
    with fleet.infer():
        clock.now += 40
        fleet.comes()
        await fleet.answer()
    found = await metrics(fleet.dataplane)
    assert found[f"gateway_fleet_expected_start_seconds{{{OF_TEXT}}}"] == learned


async def test_more_requests_than_the_model_accepts_are_refused(fleet: Fleet, clock: Clock) -> None:
    with fleet.infer(), fleet.infer(), fleet.infer():
        error = await refused(fleet.infer())
        fleet.started(40)
        later = await refused(fleet.infer())
    assert isinstance(error, RetryLater)
    message = (
        "model 'text' has no replica; one is being started, and 3 requests wait for it, the most "
        "that may ('max_in_flight')"
    )
    assert (error.advice.retry_after_secs, error.message) == (1, message)
    assert isinstance(later, RetryLater)
    assert (later.advice.retry_after_secs, later.message) == (
        40,
        f"{message}, expected in about 40 s",
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


async def test_a_request_without_the_time_for_a_start_is_refused_and_asks_for_one(
    fleet: Fleet, clock: Clock
) -> None:
    fleet.started(39.95)
    with fleet.infer(timeout_us=60_000_000):
        assert fleet.waiting == 1
    error = await refused(fleet.infer(timeout_us=10_000_000))
    assert isinstance(error, RetryLater)
    assert error.advice.retry_after_secs == 40
    assert error.message == (
        "model 'text' has no replica; one is being started, expected in about 40 s"
    )
    assert fleet.router.news().needs == {"text": 0.01}
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hello"]}
    body = {"inputs": [tensor], "parameters": {"timeout": 10_000_000}}
    answer = await post(fleet.dataplane, "/v2/models/text/infer", body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "40")
    assert answer.json()["error"] == error.message
    fleet.started(2000)
    body = {"text_input": "hello"}
    answer = await post(fleet.dataplane, "/v2/models/text/generate_stream", body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1020")


async def test_a_stream_says_when_its_replica_is_expected(fleet: Fleet) -> None:
    loop = asyncio.get_running_loop()
    with fleet.infer() as stream:
        assert stream.model_at == math.inf
    fleet.started(60)
    with fleet.infer() as stream:
        assert 50 < (stream.model_at or 0) - loop.time() < 61
        fleet.comes()
        await fleet.answer()
        assert stream.model_at is None


async def test_a_stream_of_events_has_comments_while_it_waits(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    comments: list[bytes] = []

    def commented(model_at: float | None) -> bytes:
        comments.append(silence_comment(model_at))
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
    assert answer.content.startswith(b": waiting for the model\n\n")
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


async def test_requests_wait_on_when_the_configuration_changes(fleet: Fleet) -> None:
    with fleet.infer() as stream:
        fleet.replica.offer(offered(CHANGED))
        assert await fleet.answer() == ["hello"]
        assert text(await soon(stream.only())) == b"hello"
    assert fleet.dataplane.model("text").config == CHANGED


async def test_a_change_of_the_configuration_begins_no_wait_anew(
    fleet: Fleet, clock: Clock
) -> None:
    fleet.started(60)
    fleet.room.prefill_rate = 7.0
    with fleet.infer(received_ns=time.perf_counter_ns() - 500 * 10**9) as stream:
        expected_at = stream.model_at
        clock.now += 40
        fleet.replica.offer(offered(CHANGED), state=ReplicaState.STARTING)
        await until(lambda: fleet.dataplane.model("text").config == CHANGED)
        assert stream.model_at == expected_at
        assert fleet.timer.when() <= asyncio.get_running_loop().time() + 100
        assert fleet.room.prefill_rate == 7
        fleet.replica.offer(offered(CHANGED))
        await fleet.answer()
    assert fleet.room.need == 0.01
    found = await metrics(fleet.dataplane)
    assert found[f"gateway_fleet_expected_start_seconds{{{OF_TEXT}}}"] == 50
