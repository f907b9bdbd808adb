"""Replicas that refuse requests for lack of room."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.admission.timed_request import unreachable
from gateway.config import ModelConfig
from gateway.errors import InferenceError, Refusal, RetryLater
from gateway.fleet import choice
from gateway.fleet.choice import ReplicaState
from gateway.messages import SequenceTag
from gateway.stream import ResponseStream
from tests.builders import TEXT, soon, text_request
from tests.gateway.admission.deadline_planes import values
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered
from tests.gateway.fleet.losing import KEY, taken
from tests.gateway.fleet.routing import NO_SUMS, Routed, routing, sums, text

FULL = "Exceeds maximum queue size"


@pytest.fixture
def hosted() -> ModelConfig:
    """A model that may have effects: only requests that have not begun are sent twice."""
    return replace(TEXT, backend="python")


async def failed(stream: ResponseStream) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        await soon(stream.only())
    return caught.value


async def test_a_request_that_a_full_replica_refuses_is_sent_to_another_one(
    routed: Routed, replicas: list[FakeReplica], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "sluice.fleet")
    with routed.dataplane.infer(text_request()) as stream:
        full, call = await taken(*replicas)
        full.fail(call, RetryLater(FULL))
        other, call = await taken(*replicas)
        assert other is not full
        other.answer(call, "hello")
        assert text(await soon(stream.only())) == b"hello"
    assert sums(routed) == {**NO_SUMS, "requests": 2, "retries": 1}
    assert caplog.messages == []  # there may be thousands in a second


@pytest.mark.parametrize("draining", [False, True], ids=["ready", "draining"])
async def test_a_refusal_behind_steps_of_an_ensemble_is_that_of_the_request(
    routed: Routed, replicas: list[FakeReplica], *, draining: bool
) -> None:
    """The steps may have had effects."""
    error = RetryLater(FULL, 2.5)
    error.after_steps = True
    with routed.dataplane.infer(text_request()) as stream:
        found, call = await taken(*replicas)
        if draining:
            found.offer(*found.offers.models, state=ReplicaState.DRAINING)
        found.fail(call, error)
        refusal = await failed(stream)
    assert isinstance(refusal, RetryLater)
    assert (refusal.message, refusal.advice.retry_after_secs) == (FULL, 2.5)
    assert (sums(routed)["retries"], values(routed.dataplane)) == (0, {"refused_total": 1})
    assert not any(each.calls for each in replicas)


async def test_a_replica_that_was_full_gets_no_other_request_for_a_second(
    routed: Routed, replicas: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "REFUSAL_SECS", 3600.0)
    with ExitStack() as streams:
        streams.enter_context(routed.dataplane.infer(text_request()))
        full, call = await taken(*replicas)
        full.fail(call, RetryLater(FULL))
        for _ in range(9):
            other, _ = await taken(*replicas)
            assert other is not full
            streams.enter_context(routed.dataplane.infer(text_request()))
        (connection,) = [
            each for each in routed.router.connections if each.address.endswith(f":{full.port}")
        ]
        assert connection.loads[KEY].refused_until > 0


async def test_a_request_that_two_full_replicas_refuse_is_refused(
    tmp_path: Path, replicas: list[FakeReplica], hosted: ModelConfig
) -> None:
    async with listening() as third:
        third.offer(offered(hosted))
        every = [*replicas, third]
        async with routing(tmp_path, *every) as routed:
            with routed.dataplane.infer(text_request()) as stream:
                for secs in (1.5, 2.5):
                    full, call = await taken(*every)
                    full.fail(call, RetryLater(FULL, secs))
                error = await failed(stream)
            assert isinstance(error, RetryLater)
            assert (error.message, error.advice.retry_after_secs) == (FULL, 2.5)
            assert not any(each.calls for each in every)
            assert values(routed.dataplane) == {"refused_total": 1}
            assert routed.dataplane.admission is None


async def test_full_replicas_get_requests_if_there_are_no_others(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    for _ in range(3):
        with routed.dataplane.infer(text_request()) as stream:
            for _ in range(2):
                full, call = await taken(*replicas)
                full.fail(call, RetryLater(FULL))
            assert (await failed(stream)).message == FULL


async def test_a_request_of_a_sequence_has_the_refusal_of_its_replica(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    request = replace(text_request(), sequence=SequenceTag(7, start=True))
    with routed.dataplane.infer(request) as stream:
        full, call = await taken(*replicas)
        full.fail(call, RetryLater(FULL))
        assert (await failed(stream)).message == FULL
    assert sums(routed)["retries"] == 0


async def test_a_refusal_by_a_deadline_says_nothing_of_the_room_of_a_replica(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    with routed.dataplane.infer(text_request()) as stream:
        found, call = await taken(*replicas)
        found.fail(call, unreachable(2.0, 1.0, "its first response"))
        assert isinstance(await failed(stream), Refusal)
    assert all(each.loads[KEY].refused_until < 0 for each in routed.router.connections)
