"""Requests with deadlines, over a data plane with a model that tests drive."""

import asyncio
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from gateway.config import DynamicBatching
from gateway.errors import InferenceError, Refusal, RefusalReason, RetryLater
from gateway.messages import WATCHED, Deadline, InferRequest
from gateway.models.model import Model
from gateway.rollouts.observation import Arm, Observation
from tests.builders import (
    TEXT,
    Execution,
    ScriptedInstance,
    read_all,
    soon,
    text_request,
)
from tests.conftest import Serve
from tests.gateway.admission.deadline_planes import SECOND, first, plane, tokens, values, whole
from tests.gateway.admission.twin_planes import NUMBERS, request

SOON_NS = SECOND // 50
LATER_NS = SECOND // 2
"""Time enough for a few steps before it on a machine with other work."""


def in_a_moment(after_ns: int = SOON_NS) -> int:
    return time.perf_counter_ns() + after_ns


async def exceeded(stream: Any) -> str:
    with pytest.raises(Refusal) as caught:
        await soon(read_all(stream))
    assert caught.value.refusal_reason is RefusalReason.DEADLINE_EXCEEDED
    return caught.value.message


async def test_a_queued_request_leaves_its_queue_at_its_deadline(serve: Serve) -> None:
    instance = ScriptedInstance(concurrency=1)
    dataplane = plane(serve(instance))
    with dataplane.infer(text_request("1")) as running:
        execution = await instance.begun()
        queued = dataplane.infer(text_request("2", deadline=first(in_a_moment())))
        behind = dataplane.infer(text_request("3"))
        assert await exceeded(queued) == "deadline exceeded after 0 tokens"
        execution.finish("one")
        assert await soon(read_all(running)) == ["one"]
        (await instance.begun()).finish("three")
        assert await soon(read_all(behind)) == ["three"]
    assert instance.asked == ["1", "3"]
    assert values(dataplane)["refused_total"] == 1


@pytest.mark.parametrize("reads", [True, False])
async def test_a_running_request_is_aborted_between_tokens(serve: Serve, reads: bool) -> None:
    instance = ScriptedInstance()
    dataplane = plane(serve(instance))
    stream = dataplane.infer(text_request("1", deadline=whole(in_a_moment(LATER_NS))))
    execution = await instance.begun()
    for _ in range(3 if reads else 100):
        execution.answer(tokens(1))
    await soon(execution.stopped.wait())
    assert stream.done
    found = await exceeded(stream)
    assert found == f"deadline exceeded after {3 if reads else execution.taken} tokens"


class Watched:
    """A rollout in which every request is the candidate's."""

    has_keys = reads_content = reads_numbers = False

    def __init__(self, model: Model) -> None:
        self.model = model
        self.ended = list[Observation]()

    def choose(self, request: InferRequest) -> tuple[Model, Observation]:
        return self.model, Observation(self, Arm.CANDIDATE)

    def refused(self, request: InferRequest, model: Model, error: InferenceError) -> None:
        raise AssertionError(error)

    def admit(self, observation: Observation) -> None:
        pass

    def end(self, observation: Observation) -> None:
        self.ended.append(observation)


async def test_a_deadline_is_no_evidence_about_a_version(serve: Serve) -> None:
    """One request ends in its execution, and one in the queue."""
    instance = ScriptedInstance(concurrency=1)
    model = serve(instance)
    model.chooser = watched = Watched(model)  # type: ignore[assignment]
    dataplane = plane(model)
    running = dataplane.infer(text_request("1", deadline=whole(in_a_moment(LATER_NS))))
    await instance.begun()
    queued = dataplane.infer(text_request("2", deadline=first(in_a_moment())))
    for each in (queued, running):
        assert await exceeded(each)
    assert [(each.failed, each.complete) for each in watched.ended] == [(False, False)] * 2
    full = Observation(watched, Arm.CANDIDATE)
    full.finish(RetryLater("no room"))
    assert full.failed


async def test_the_deadline_of_a_first_response_does_not_bound_a_stream(serve: Serve) -> None:
    instance = ScriptedInstance()
    dataplane = plane(serve(instance))
    due = in_a_moment(LATER_NS)
    with dataplane.infer(text_request("1", deadline=first(due))) as stream:
        execution = await instance.begun()
        execution.answer(tokens(1))
        assert await soon(stream.batch())
        later = dataplane.infer(text_request("2", deadline=first(due)))
        assert await exceeded(later)
        execution.finish("end")
        assert await soon(read_all(stream)) == ["end"]


def succeed(execution: Execution, stream: Any) -> None:
    execution.finish("end")


def fail(execution: Execution, stream: Any) -> None:
    execution.crash(RuntimeError("no"))


def cancel(execution: Execution, stream: Any) -> None:
    stream.cancel()


def interrupt(execution: Execution, stream: Any) -> None:
    stream.interrupt()


@pytest.mark.parametrize("end", [succeed, fail, cancel, interrupt])
async def test_no_timer_is_left_of_a_request_that_has_ended(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, end: Any
) -> None:
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def kept(delay: float, call: Any, *given: Any) -> asyncio.TimerHandle:
        timers.append(call_later(delay, call, *given))
        return timers[-1]

    instance = ScriptedInstance()
    dataplane = plane(serve(instance))
    due = time.perf_counter_ns() + 3600 * SECOND
    monkeypatch.setattr(loop, "call_later", kept)
    stream = dataplane.infer(text_request("1", deadline=Deadline(due, due, due, due, asked=True)))
    monkeypatch.undo()
    execution = await instance.begun()
    end(execution, stream)
    await soon(execution.stopped.wait())
    assert stream.done
    assert [each.cancelled() for each in timers] == [True]


async def test_a_deadline_that_has_passed_is_refused_at_once(serve: Serve) -> None:
    instance = ScriptedInstance()
    dataplane = plane(serve(instance))
    for found in (whole(1), first(1), whole(time.perf_counter_ns())):
        with pytest.raises(Refusal, match="deadline exceeded after 0 tokens") as caught:
            dataplane.infer(text_request("1", deadline=found))
        assert caught.value.refusal_reason is RefusalReason.DEADLINE_EXCEEDED
        assert not caught.value.advice.retries
    assert instance.executions == []


async def test_the_parameter_is_a_deadline_and_the_model_does_not_get_it(serve: Serve) -> None:
    instance = ScriptedInstance()
    dataplane = plane(serve(instance))
    stream = dataplane.infer(text_request("1", parameters={"deadline_ms": 500, "seed": 1}))
    execution = await instance.begun()
    assert execution.requests[0].parameters == {"seed": 1}
    assert await exceeded(stream) == "deadline exceeded after 0 tokens"


async def test_a_model_has_a_wait_for_requests_that_name_none(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance, config=replace(TEXT, parameters={"max_wait_ms": "20"}))
    dataplane = plane(model)
    assert await exceeded(dataplane.infer(text_request("1")))
    own = whole(time.perf_counter_ns() + 3600 * SECOND)
    with dataplane.infer(text_request("2", deadline=own)) as stream:
        assert await exceeded(dataplane.infer(text_request("3")))
        execution = await instance.begun()
        while execution.requests[0].inputs[0].elements() != (b"2",):
            execution = await instance.begun()
        execution.finish("two")
        assert await soon(read_all(stream)) == ["two"]


@pytest.mark.parametrize(
    ("room", "places", "batch", "rows", "free"),
    [
        (None, None, 0, 1, WATCHED),
        (10, None, 0, 1, WATCHED),
        (40, None, 0, 1, 20),
        (40, None, 0, 8, 20),
        (None, 40, 0, 1, 20),
        (1, None, 64, 1, 32),
        (2, None, 32, 1, 32),
        (1, None, 64, 2, 16),
        (1, None, 64, 64, WATCHED),
    ],
)
async def test_limits_that_clients_have_of_their_own_matter_with_half_of_the_room_in_flight(
    serve: Serve, room: int | None, places: int | None, batch: int, rows: int, free: int
) -> None:
    """With a dynamic batcher, room and requests are counted in rows."""
    instance = ScriptedInstance(concurrency=room)
    instance.places = places
    batching = DynamicBatching() if batch else None
    config = replace(NUMBERS, name="m0", max_batch_size=batch or 8, dynamic_batching=batching)
    model = serve(instance, config=config)
    dataplane = plane(model)
    own = Deadline(first_ns=time.perf_counter_ns() + 600 * SECOND)
    with ExitStack() as streams:
        for number in range(free):
            asked = request(f"{number}", 0, "", rows, deadline=own)
            streams.enter_context(dataplane.infer(asked))
            assert dataplane.admission is None
        streams.enter_context(dataplane.infer(request("last", 0, "", rows, deadline=own)))
        assert dataplane.admission is not None
    assert (len(model.requests), model.requests.rows) == (0, 0)


async def test_limits_that_clients_have_of_their_own_matter_at_a_model_of_texts_with_less_in_flight(
    serve: Serve,
) -> None:
    dataplane = plane(serve(ScriptedInstance(concurrency=40)))
    own = Deadline(first_ns=time.perf_counter_ns() + 600 * SECOND)
    with ExitStack() as streams:
        for _ in range(WATCHED):
            streams.enter_context(dataplane.infer(text_request(deadline=own)))
            assert dataplane.admission is None
        streams.enter_context(dataplane.infer(text_request(deadline=own)))
        assert dataplane.admission is not None


async def test_the_limit_of_a_client_is_not_held_by_the_server(serve: Serve) -> None:
    instance = ScriptedInstance()
    dataplane = plane(serve(instance))
    due = in_a_moment()
    with dataplane.infer(text_request(deadline=replace(first(due), held_first_ns=0))) as stream:
        held = dataplane.infer(text_request(deadline=first(due + SOON_NS)))
        assert await exceeded(held)
        (await instance.begun()).finish("late")
        assert await soon(read_all(stream)) == ["late"]
