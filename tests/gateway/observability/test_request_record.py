"""The account of one request: counts and durations, once, where its stream ends."""

import asyncio
import time
from copy import copy
from itertools import count
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse, Usage, response_of_text
from gateway.observability.request_record import Record
from gateway.observability.statistics import (
    MAX_RESPONSE_ROWS,
    QUEUE_TIMEOUT,
    FailureReason,
    ModelStatistics,
    statistics_row,
)
from tests.builders import (
    ScriptedInstance,
    read_all,
    soon,
    text_request,
    text_response,
)
from tests.conftest import Serve


def tokens(completion: int, *, prompt: int = 0, final: bool = False) -> InferResponse:
    return InferResponse(usage=Usage(prompt, completion), final=final)


# Requests.


async def test_a_stream_of_many_responses_is_one_success_at_its_end(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance)
    with model.submit(text_request()) as stream:
        execution = await instance.begun()
        for text in ("one", "two", "three"):
            execution.answer(text_response(text))
        await soon(stream.batch())
        assert model.statistics.success.count == 0
        execution.finish("four")
        assert await soon(read_all(stream)) == ["four"]
    statistics = model.statistics
    assert (statistics.success.count, statistics.fail.count) == (1, 0)
    assert (statistics.queue.count, statistics.compute_infer.count) == (1, 1)
    assert statistics.inference_count == 1


async def test_a_success_lasts_no_shorter_than_its_queue_and_compute_time(serve: Serve) -> None:
    instance = ScriptedInstance(concurrency=1)
    model = serve(instance)
    with model.submit(text_request("a")) as first, model.submit(text_request("b")) as second:
        execution = await instance.begun()
        await asyncio.sleep(0.01)  # the second waits in the queue meanwhile
        execution.finish("a")
        await soon(read_all(first))
        (await instance.begun()).finish("b")
        await soon(read_all(second))
    found = model.statistics
    assert found.success.count == 2
    assert found.success.ns >= found.queue.ns + found.compute_infer.ns
    assert found.queue.ns >= 10_000_000
    assert found.compute_infer.ns >= 10_000_000


async def test_time_counts_from_when_the_frontend_had_the_request(
    statistics: ModelStatistics,
) -> None:
    record = Record(statistics, 1, 1, lambda _: None)  # one nanosecond after the clock's start
    record.started()
    record.responded(tokens(1))
    record.ended(None)
    assert statistics.success.ns > 1_000_000_000
    assert statistics.queue.ns < 1_000_000_000, "from when it was submitted"


def test_inferences_count_the_rows_of_a_batch(statistics: ModelStatistics) -> None:
    record = Record(statistics, 5, 0, lambda _: None)
    record.started()
    record.ended(None)
    assert (statistics.success.count, statistics.inference_count) == (1, 5)


@pytest.mark.parametrize(
    ("error", "started", "reason"),
    [
        (InferenceError(Code.CANCELLED, "left"), True, FailureReason.CANCELED),
        (InferenceError(Code.CANCELLED, "left"), False, FailureReason.CANCELED),
        (InferenceError(Code.INTERNAL, "broken"), True, FailureReason.BACKEND),
        (InferenceError(Code.UNAVAILABLE, "stopping"), False, FailureReason.OTHER),
        (
            InferenceError(Code.UNAVAILABLE, "Request timeout expired"),
            False,
            FailureReason.REJECTED,
        ),
        (InferenceError(Code.UNAVAILABLE, QUEUE_TIMEOUT), True, FailureReason.BACKEND),
    ],
)
def test_a_failure_has_a_reason(
    statistics: ModelStatistics,
    record: Record,
    error: InferenceError,
    started: bool,
    reason: FailureReason,
) -> None:
    if started:
        record.started()
    record.ended(error)
    assert statistics.failures == {each: int(each is reason) for each in FailureReason}
    assert (statistics.fail.count, statistics.success.count) == (1, 0)
    assert (statistics.queue.count, statistics.inference_count) == (0, 0)


@pytest.mark.parametrize("error", [None, InferenceError(Code.INTERNAL, "broken")])
def test_a_request_is_pending_until_an_instance_has_it(
    statistics: ModelStatistics, record: Record, error: InferenceError | None
) -> None:
    assert statistics.pending == 1
    record.started()
    assert statistics.pending == 0
    record.ended(error)
    assert statistics.pending == 0


def test_a_request_that_is_executed_again_is_pending_once(
    statistics: ModelStatistics, record: Record
) -> None:
    record.started()
    record.started()
    assert statistics.pending == 0


def test_a_request_that_ends_in_the_queue_is_pending_no_more(
    statistics: ModelStatistics, record: Record
) -> None:
    record.ended(InferenceError(Code.CANCELLED, "left"))
    assert statistics.pending == 0


def test_the_end_is_reported_once(statistics: ModelStatistics) -> None:
    ended: list[Record] = []
    record = Record(statistics, 1, 0, ended.append)
    record.started()
    assert ended == []
    record.ended(None)
    assert ended == [record]


# Tokens.


def test_tokens_are_summed_over_the_responses(statistics: ModelStatistics, record: Record) -> None:
    record.started()
    record.responded(tokens(2, prompt=7))
    record.responded(tokens(3))
    record.responded(tokens(1, final=True))
    assert (statistics.prompt_tokens, statistics.completion_tokens) == (7, 6)
    assert (record.prompt_tokens, record.completion_tokens) == (7, 6)
    assert statistics.wasted_tokens == 0


def test_the_first_tokens_have_a_time_and_the_others_a_gap(
    statistics: ModelStatistics, record: Record
) -> None:
    record.started()
    for _ in range(4):
        record.responded(tokens(2))
    assert sum(statistics.first_token.counts) == 1
    assert sum(statistics.first_response_ms.counts) == 1
    assert sum(statistics.inter_token.counts) == 3


def test_a_model_that_counts_no_tokens_has_no_time_to_the_first_one(
    statistics: ModelStatistics, record: Record
) -> None:
    record.started()
    record.responded(text_response("one"))
    record.responded(text_response("two"))
    assert sum(statistics.first_response_ms.counts) == 1
    assert sum(statistics.first_token.counts) == 0
    assert sum(statistics.inter_token.counts) == 0


def test_the_first_tokens_may_come_after_the_first_response(
    statistics: ModelStatistics, record: Record
) -> None:
    record.started()
    record.responded(text_response("the role"))
    record.responded(tokens(1, prompt=7))
    record.responded(tokens(1))
    assert sum(statistics.first_response_ms.counts) == 1
    assert sum(statistics.first_token.counts) == 1
    assert sum(statistics.inter_token.counts) == 1
    assert statistics.completion_tokens == 2


def test_a_prompt_alone_has_no_time_to_the_first_token(
    statistics: ModelStatistics, record: Record
) -> None:
    record.started()
    record.responded(tokens(0, prompt=7, final=True))
    assert statistics.prompt_tokens == 7
    assert sum(statistics.first_token.counts) == 0


def test_a_response_without_tokens_between_others_counts_none(
    statistics: ModelStatistics, record: Record
) -> None:
    record.started()
    record.responded(tokens(1))
    record.responded(tokens(0))
    record.responded(text_response("a tail", final=True))
    assert statistics.completion_tokens == 1
    assert sum(statistics.inter_token.counts) == 0


@pytest.mark.parametrize("rows", [[], None], ids=["rows", "no rows"])
@pytest.mark.parametrize("is_traced", [False, True], ids=["", "traced"])
def test_a_delivered_text_counts_as_its_response(
    monkeypatch: pytest.MonkeyPatch, rows: list[Any] | None, is_traced: bool
) -> None:
    def counted(*, delivers: bool) -> tuple[ModelStatistics, list[Any]]:
        clock = (number * number for number in count(1000))
        monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
        statistics, seen = ModelStatistics(responses=copy(rows)), list[Any]()
        record = Record(statistics, 1, 0, lambda record: None)
        record.started()
        record.trace = Noting(seen) if is_traced else None  # type: ignore[assignment]
        for number in range(MAX_RESPONSE_ROWS + 2):
            text, new = b"%d" % number, number % 3
            if delivers:
                record.delivered("OUT", (text,), (new,))
            else:
                record.responded(response_of_text("OUT", text, new))
        return statistics, [seen, record.progress_ns]

    first, second = counted(delivers=True), counted(delivers=False)
    assert statistics_row("m", "1", first[0]) == statistics_row("m", "1", second[0])
    assert first[0].completion_tokens == second[0].completion_tokens > 0
    for name in ("inter_token", "first_token", "first_response_ms"):
        one, other = getattr(first[0], name), getattr(second[0], name)
        assert (one.counts, one.total) == (other.counts, other.total)
    assert first[1] == second[1]
    assert len(first[1][0]) == (MAX_RESPONSE_ROWS + 2 if is_traced else 0)


class Noting:
    """A trace that notes the outputs of responses."""

    ids, reads_responses = None, True

    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    def responded(self, response: InferResponse, ns: int, *, first: bool) -> None:
        self._seen.append((response.outputs, ns, first))


async def test_tokens_for_a_cancelled_reader_are_wasted(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance)
    with model.submit(text_request()) as stream:
        execution = await instance.begun()
        execution.answer(text_response("one", tokens=1))
        await soon(stream.batch())
        execution.answer(text_response("two", tokens=4))
        execution.answer(text_response("three", tokens=8))
        stream.cancel()
    await soon(execution.stopped.wait())
    assert model.statistics.completion_tokens == 1
    model.statistics.waste(12)  # as a backend says when its runtime had made more
    assert model.statistics.wasted_tokens == 12


# What was spent outside the engine.


def test_the_overhead_is_observed_once_when_the_first_response_is_taken(
    statistics: ModelStatistics, record: Record
) -> None:
    record.started()
    record.responded(tokens(1))
    assert sum(statistics.overhead.counts) == 0
    record.taken()
    assert sum(statistics.overhead.counts) == 1
    assert statistics.overhead.total >= 0.0
