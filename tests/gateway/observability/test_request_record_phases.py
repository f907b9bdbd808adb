"""Phases of a request, and counts of each response."""

from dataclasses import replace

import pytest

from gateway.config.scheduling import EnsembleScheduling, EnsembleStep
from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse, Phases
from gateway.observability.request_record import Record, within
from gateway.observability.statistics import (
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


@pytest.mark.parametrize(("rows", "share"), [(0, 1), (2, 1), (8, 0.25)])
def test_the_compute_time_of_a_request_is_the_part_of_its_rows(rows: int, share: float) -> None:
    record = Record(ModelStatistics(), 2, 0, lambda _: None)
    assert record.compute_ms(2**62) == 0
    record.started()
    record.execution_rows = rows
    record.responded(phased(Phases(1_000_000, 5_000_000, 2_000_000)))
    assert record.compute_ms(2**62) == 8 * share


@pytest.mark.parametrize("phases", [None, Phases(10**15, 10**15, 10**15)])
def test_the_compute_time_of_a_request_is_no_longer_than_its_execution(
    record: Record, phases: Phases | None
) -> None:
    record.started()
    record.phases = phases
    assert record.compute_ms(record.started_ns + 3_000_000) == 3


def test_a_cached_response_has_no_compute_time(record: Record) -> None:
    record.hit(5)
    assert record.compute_ms(2**62) == 0


async def test_an_execution_has_the_phases_of_its_answers(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance)
    with model.submit(text_request()) as stream:
        execution = await instance.begun()
        execution.answer(InferResponse(final=True, phases=Phases(1, 2, 3)))
        execution.end()
        await soon(read_all(stream))
        await soon(execution.stopped.wait())
    await soon(model.requests.drained())
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
