"""The account of one request: counts and durations, once, where its stream ends."""

import asyncio
from dataclasses import replace

import pytest

from gateway.config.scheduling import EnsembleScheduling, EnsembleStep
from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse, Phases, Usage
from gateway.observability.request_record import Record, within
from gateway.observability.statistics import (
    QUEUE_TIMEOUT,
    FailureReason,
    ModelStatistics,
    Summaries,
)
from tests.builders import (
    DECOUPLED,
    FLAG,
    TEXT,
    ScriptedInstance,
    read_all,
    soon,
    text_request,
    text_response,
)
from tests.conftest import Serve


def tokens(completion: int, *, prompt: int = 0, final: bool = False) -> InferResponse:
    return InferResponse(usage=Usage(prompt, completion), final=final)


@pytest.fixture
def statistics() -> ModelStatistics:
    return ModelStatistics()


@pytest.fixture
def record(statistics: ModelStatistics) -> Record:
    return Record(statistics, 1, 0, lambda _: None)


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


# Phases.


def phased(phases: Phases, *, final: bool = True) -> InferResponse:
    return InferResponse(phases=phases, final=final)


@pytest.mark.parametrize(
    ("phases", "elapsed", "kept"),
    [
        (None, 100, Phases(0, 100, 0)),
        (Phases(10, 80, 10), 100, Phases(10, 80, 10)),
        (Phases(10, 50, 10), 100, Phases(10, 50, 10)),
        (Phases(10, 90, 10), 100, Phases(10, 80, 10)),
        (Phases(200, 90, 10), 100, Phases(100, 0, 0)),
        (Phases(60, 90, 60), 100, Phases(60, 0, 40)),
    ],
)
def test_phases_never_exceed_the_elapsed_time(
    phases: Phases | None, elapsed: int, kept: Phases
) -> None:
    assert within(phases, elapsed) == kept


def test_the_phases_of_a_backend_are_counted_apart(
    statistics: ModelStatistics, record: Record
) -> None:
    record.started()
    record.responded(phased(Phases(1, 2, 3)))
    record.ended(None)
    assert (statistics.compute_input.count, statistics.compute_input.ns) == (1, 1)
    assert (statistics.compute_infer.count, statistics.compute_infer.ns) == (1, 2)
    assert (statistics.compute_output.count, statistics.compute_output.ns) == (1, 3)


def test_a_request_never_lasts_shorter_than_its_parts(
    statistics: ModelStatistics, record: Record
) -> None:
    record.started()
    record.responded(phased(Phases(10**15, 10**15, 10**15)))
    record.ended(None)
    parts = (statistics.queue, statistics.compute_input, statistics.compute_infer)
    spent = sum(part.ns for part in (*parts, statistics.compute_output))
    assert spent <= statistics.success.ns


async def test_an_execution_has_the_phases_of_its_answers(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance)
    with model.submit(text_request()) as stream:
        execution = await instance.begun()
        execution.answer(InferResponse(final=True, phases=Phases(1, 2, 3)))
        execution.end()
        await soon(read_all(stream))
        await soon(execution.stopped.wait())
    await soon(model.drained())
    batch = model.statistics.batches[1]
    phases = (batch.compute_input.ns, batch.compute_infer.ns, batch.compute_output.ns)
    assert phases == (1, 2, 3)


# The responses of decoupled models.


@pytest.fixture
def decoupled(statistics: ModelStatistics) -> ModelStatistics:
    statistics.responses = []
    return statistics


def counts(statistics: ModelStatistics, name: str) -> list[int]:
    return [getattr(row, name).count for row in statistics.responses or ()]


def test_each_response_counts_at_its_index(decoupled: ModelStatistics, record: Record) -> None:
    record.started()
    record.responded(text_response("one"))
    record.responded(text_response("two"))
    record.responded(FLAG)
    record.ended(None)
    assert counts(decoupled, "success") == [1, 1, 0]
    assert counts(decoupled, "compute_infer") == [1, 1, 1]
    assert counts(decoupled, "compute_output") == [1, 1, 0]
    assert counts(decoupled, "empty_response") == [0, 0, 1]
    assert counts(decoupled, "fail") == counts(decoupled, "cancel") == [0, 0, 0]


@pytest.mark.parametrize(("code", "name"), [(Code.INTERNAL, "fail"), (Code.CANCELLED, "cancel")])
def test_an_error_counts_in_place_of_the_next_response(
    decoupled: ModelStatistics, record: Record, code: Code, name: str
) -> None:
    record.started()
    record.responded(text_response("one"))
    record.ended(InferenceError(code, "no more"))
    assert counts(decoupled, "success") == [1, 0]
    assert counts(decoupled, name) == [0, 1]
    assert counts(decoupled, "compute_infer") == [1, int(name == "fail")]


def test_the_time_of_a_response_is_its_inference_and_its_output(
    decoupled: ModelStatistics, record: Record
) -> None:
    record.started()
    record.responded(text_response("one"))
    (row,) = decoupled.responses or ()
    assert row.success.ns == row.compute_infer.ns + row.compute_output.ns


async def test_a_decoupled_model_counts_per_response(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance, config=replace(TEXT, model_transaction_policy=DECOUPLED))
    model.statistics.responses = []
    with model.submit(text_request()) as stream:
        execution = await instance.begun()
        execution.answer(text_response("one"))
        execution.finish("two")
        assert await soon(read_all(stream)) == ["one", "two"]
    assert counts(model.statistics, "success") == [1, 1]


# The response cache.


def test_a_hit_is_a_success_without_an_inference(
    statistics: ModelStatistics, record: Record
) -> None:
    record.hit(500)
    assert statistics.pending == 0
    record.responded(text_response("kept", final=True))
    record.ended(None)
    assert (statistics.success.count, statistics.queue.count) == (1, 1)
    assert (statistics.cache_hit.count, statistics.cache_hit.ns) == (1, 500)
    assert (statistics.inference_count, statistics.compute_infer.count) == (0, 0)
    assert statistics.pending == 0
    assert statistics.success.ns >= statistics.queue.ns


def test_a_miss_lengthens_the_success(statistics: ModelStatistics, record: Record) -> None:
    record.started()
    record.ended(None)
    before = statistics.success.ns
    record.missed(7000)
    assert (statistics.cache_miss.count, statistics.cache_miss.ns) == (1, 7000)
    assert (statistics.success.count, statistics.success.ns) == (1, before + 7000)


# Summaries.


def test_summaries_and_counters_agree(statistics: ModelStatistics, record: Record) -> None:
    statistics.summaries = summaries = Summaries()
    record.started()
    record.responded(phased(Phases(1_000, 2_000, 3_000)))
    record.ended(None)
    record.missed(9_999)
    hit = Record(statistics, 1, 0, lambda _: None)
    hit.hit(4_500)
    hit.ended(None)
    assert (summaries.request.count, summaries.queue.count) == (2, 2)
    assert (summaries.compute_infer.count, summaries.cache_hit.total) == (1, 4)
    assert summaries.cache_miss.total == 9


@pytest.mark.parametrize(("started", "count"), [(True, 1), (False, 0)])
def test_an_error_may_be_the_first_response(
    statistics: ModelStatistics, record: Record, started: bool, count: int
) -> None:
    if started:
        record.started()
    record.ended(InferenceError(Code.INTERNAL, "broken"))
    assert sum(statistics.first_response_ms.counts) == count


def test_an_error_after_a_response_is_not_the_first(
    statistics: ModelStatistics, record: Record
) -> None:
    record.started()
    record.responded(text_response("one"))
    record.ended(InferenceError(Code.INTERNAL, "broken"))
    assert sum(statistics.first_response_ms.counts) == 1


# Ensembles.


def test_an_ensemble_counts_one_execution_and_the_sum_of_its_members() -> None:
    statistics = ModelStatistics(composed=True)
    record = Record(statistics, 3, 0, lambda _: None)
    record.started()
    much = 10**12
    record.responded(InferResponse(final=True, phases=Phases(much, 2 * much, 3 * much)))
    record.ended(None)
    assert (statistics.execution_count, statistics.inference_count) == (1, 3)
    assert statistics.batches[3].compute_infer.ns == 2 * much
    took = (statistics.compute_input.ns, statistics.compute_infer.ns, statistics.compute_output.ns)
    assert took == (much, 2 * much, 3 * much)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(Code.INTERNAL, FailureReason.OTHER), (Code.CANCELLED, FailureReason.CANCELED)],
)
def test_the_failure_of_an_ensemble_is_not_an_execution(code: Code, reason: FailureReason) -> None:
    statistics = ModelStatistics(composed=True)
    record = Record(statistics, 1, 0, lambda _: None)
    record.started()
    record.ended(InferenceError(code, "in ensemble 'e', no way"))
    assert (statistics.execution_count, statistics.batches) == (0, {})
    assert {each: count for each, count in statistics.failures.items() if count} == {reason: 1}


def test_a_decoupled_ensemble_has_no_rows_per_response() -> None:
    step = EnsembleStep(model_name="a")
    config = replace(
        TEXT,
        model_transaction_policy=DECOUPLED,
        ensemble_scheduling=EnsembleScheduling(step=(step,)),
    )
    statistics = ModelStatistics.of(config)
    assert (statistics.composed, statistics.responses) == (True, None)
