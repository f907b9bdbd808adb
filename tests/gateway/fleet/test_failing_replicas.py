"""Replicas that are left out after failures, and requests that are refused after losses."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from gateway.admission.timed_request import exceeded, unreachable
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError, RefusedError
from gateway.fleet import connection, pauses
from gateway.fleet.choice import ReplicaState
from gateway.messages import InferRequest
from gateway.observability.statistics import QUEUE_TIMEOUT
from tests.builders import soon, text_response, texts
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.losing import (
    KEY,
    LLM,
    STOPPED,
    back,
    generation,
    lose_after,
    read,
    taken,
)
from tests.gateway.fleet.routing import Routed, routing


@pytest.fixture(autouse=True)
def _short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 0.01)


@pytest.fixture
def hosted() -> ModelConfig:
    return LLM


async def lost_twice(routed: Routed, replicas: list[FakeReplica], request: InferRequest) -> str:
    """Lose the replica of a request, and the next one; the error."""
    with routed.dataplane.infer(request) as stream:
        for _ in range(2):
            found, _ = await taken(*replicas)
            found.lose()
        with pytest.raises(InferenceError) as caught:
            await soon(stream.batch())
    await back(routed)
    return caught.value.message


async def test_a_request_that_two_lost_replicas_executed_is_refused_for_ten_minutes(
    routed: Routed, replicas: list[FakeReplica], caplog: pytest.LogCaptureFixture
) -> None:
    refusal = await lost_twice(routed, replicas, generation("bad"))
    assert (
        "2 replicas or instances were lost while they executed one with the same inputs" in refusal
    )
    assert "the routers of this fleet refuse it for 10 minutes" in refusal
    with routed.dataplane.infer(generation("bad")) as stream:
        with pytest.raises(InferenceError) as caught:
            await soon(stream.batch())
        assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, refusal)
    assert "request quarantined" in caplog.messages
    with routed.dataplane.infer(generation("good")) as stream:
        found, call = await taken(*replicas)
        found.answer(call, "hello")
        assert texts(await read(stream, 1)) == ["hello"]


async def test_requests_of_one_content_at_one_lost_replica_are_not_refused(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    replicas[1].offer()
    await until(lambda: not routed.router.connections[1].models)
    with routed.dataplane.infer(generation()) as one, routed.dataplane.infer(generation()) as two:
        await until(lambda: len(replicas[0].calls) == 2)
        replicas[0].lose()
        for each in (one, two):
            with pytest.raises(InferenceError, match="was lost while it executed the request"):
                await soon(each.batch())


async def test_an_answer_clears_a_request(routed: Routed, replicas: list[FakeReplica]) -> None:
    for _ in range(3):
        with routed.dataplane.infer(generation()) as stream:
            (await taken(*replicas))[0].lose()
            found, call = await taken(*replicas)
            found.answer(call, "hello")
            assert texts(await read(stream, 1)) == ["hello"]
        await back(routed)


async def test_an_error_of_a_refused_request_that_still_executes_is_its_own(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    async with listening() as third:
        replicas.append(third)
        third.offer(offered(LLM))
        async with routing(tmp_path, *replicas) as routed:
            with routed.dataplane.infer(generation("bad")) as stream:
                own, call = await taken(*replicas)
                others = [each for each in replicas if each is not own]
                assert "2 replicas or instances were lost" in await lost_twice(
                    routed, others, generation("bad")
                )
                own.fail(call, InferenceError(Code.INVALID_ARG, "no such parameter"))
                with pytest.raises(InferenceError, match="no such parameter"):
                    await soon(stream.batch())


async def failing(
    routed: Routed, replicas: list[FakeReplica], error: InferenceError
) -> FakeReplica | None:
    """Let the first replica fail until it is left out; the second answers. None: it is not."""
    first, _ = replicas
    failures = 0
    for number in range(40):
        with routed.dataplane.infer(generation(str(number))) as stream:
            found, call = await taken(*replicas)
            if found is first:
                found.fail(call, error)
                failures += 1
                with pytest.raises(InferenceError):
                    await soon(stream.batch())
            else:
                found.answer(call, "hello")
                await read(stream, 1)
    return first if failures == pauses.FAILURES else None


async def test_the_first_response_of_a_continuation_ends_the_pauses_of_its_replica(
    routed: Routed, replicas: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await failing(routed, replicas, STOPPED) is replicas[0]
    load = routed.router.connections[0].loads[KEY]
    with routed.dataplane.infer(generation("text")) as stream:
        assert await lose_after(stream, "b", replicas[1]) is replicas[1]
        _, call = await taken(replicas[0])
        assert load.left_out_until > 0
        replicas[0].respond(call, text_response("c", tokens=1))
        await read(stream, 1)
        assert load.left_out_until < 0


async def test_a_replica_is_left_out_after_three_failures_and_one_request_tries_it_later(
    routed: Routed, replicas: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await failing(routed, replicas, STOPPED) is replicas[0]
    connected, _ = routed.router.connections
    monkeypatch.setattr(connected.loads[KEY], "left_out_until", 0.0)
    with ExitStack() as owner:
        for number in range(9):
            owner.enter_context(routed.dataplane.infer(generation(f"later {number}")))
        await until(lambda: sum(len(each.calls) for each in replicas) == 9)
        assert len(replicas[0].calls) == 1
        replicas[0].answer(replicas[0].calls.pop(), "well again")
        await until(lambda: connected.loads[KEY].left_out_until < 0)


@pytest.mark.parametrize(
    "error",
    [
        RefusedError(Code.UNAVAILABLE, "it has no room"),
        InferenceError(Code.UNAVAILABLE, QUEUE_TIMEOUT),
        InferenceError(Code.INVALID_ARG, "no such parameter"),
        unreachable(2.0, 1.0, "its first response"),
        exceeded(3),
    ],
    ids=["no-room", "timeout", "mistake", "unreachable", "exceeded"],
)
async def test_an_error_of_load_or_of_a_request_is_no_failure_of_its_replica(
    routed: Routed, replicas: list[FakeReplica], error: InferenceError
) -> None:
    assert await failing(routed, replicas, error) is None


async def test_a_draining_replica_that_ends_its_requests_does_not_pause(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    first, second = replicas
    second.offer()
    await until(lambda: not routed.router.connections[1].models)
    with ExitStack() as owner:
        streams = [
            owner.enter_context(routed.dataplane.infer(generation(str(number), seed=1)))
            for number in range(3)
        ]
        await until(lambda: len(first.calls) == 3)
        first.offer(*first.offers.models, state=ReplicaState.DRAINING)
        for call in first.calls:
            first.fail(call, STOPPED)
        for each in streams:
            with pytest.raises(InferenceError, match="the engine has stopped"):
                await soon(each.batch())
    assert routed.router.connections[0].loads[KEY].left_out_until < 0


async def test_a_replica_that_is_lost_three_times_is_left_out(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    first, second = replicas
    for _ in range(3):
        first.lose()
        await until(lambda: routed.router.connections[0].state is None)
        await back(routed)
    with ExitStack() as owner:
        for number in range(9):
            owner.enter_context(routed.dataplane.infer(generation(str(number))))
        await until(lambda: len(second.calls) == 9)


async def test_the_only_replica_is_tried_also_after_failures(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    first, second = replicas
    second.offer()
    await until(lambda: not routed.router.connections[1].models)
    for _ in range(9):
        with routed.dataplane.infer(generation()) as stream:
            await until(lambda: bool(first.calls))
            first.fail(first.calls.pop(), STOPPED)
            with pytest.raises(InferenceError, match="the engine has stopped"):
                await soon(stream.batch())
