"""Counts, distributions and rows of the statistics extension."""

import asyncio
import math

import pytest
from google.protobuf import json_format

from gateway.config import (
    HistogramOptions,
    MetricControl,
    MetricIdentifier,
    ModelConfig,
    ModelMetrics,
    TransactionPolicy,
)
from gateway.errors import Code, InferenceError
from gateway.messages import Phases
from gateway.observability.statistics import (
    FIRST_RESPONSE_BUCKETS_MS,
    FIRST_RESPONSE_MS,
    MAX_RESPONSE_ROWS,
    RESPONSE_DURATIONS,
    FailureReason,
    Histogram,
    MemoryUsage,
    MetricDuration,
    ModelStatistics,
    failure_reason,
    statistics_row,
)
from gateway.observability.summaries import WINDOW_SECS, WINDOW_SIZE, Summary
from gateway.protos import grpc_service_pb2 as pb
from tests.builders import TEXT, ScriptedInstance, read_all, soon, text_request
from tests.conftest import Serve


@pytest.mark.parametrize(
    ("value", "counts"),
    [(0.5, [1, 0, 0]), (1.0, [1, 0, 0]), (1.5, [0, 1, 0]), (2.0, [0, 1, 0]), (2.1, [0, 0, 1])],
)
def test_a_bucket_counts_values_up_to_its_bound(value: float, counts: list[int]) -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value)
    assert histogram.counts == counts
    assert histogram.total == value


MEDIAN = (0.5,)


def test_a_summary_without_observations_knows_no_quantile() -> None:
    summary = Summary()
    assert math.isnan(summary.quantiles(MEDIAN, now=0.0)[0])
    assert (summary.count, summary.total) == (0, 0)


def test_quantiles_are_exact() -> None:
    summary = Summary()
    for value in range(100, 0, -1):
        summary.observe(value, now=1.0)
    assert summary.quantiles((0.0, 0.5, 0.9, 0.99, 1.0), now=1.0) == [1, 51, 91, 100, 100]
    assert (summary.count, summary.total) == (100, 5050)


def test_an_observation_before_the_window_is_counted_but_not_in_the_quantiles() -> None:
    summary = Summary()
    summary.observe(1000, now=0.0)
    summary.observe(1, now=1.0)
    assert summary.quantiles((1.0,), now=WINDOW_SECS) == [1000]
    assert summary.quantiles((1.0,), now=WINDOW_SECS + 0.5) == [1]
    assert math.isnan(summary.quantiles((1.0,), now=WINDOW_SECS + 1.5)[0])
    assert (summary.count, summary.total) == (2, 1001)


def test_a_summary_keeps_no_more_than_its_window_holds() -> None:
    summary = Summary()
    for value in (7,) * WINDOW_SIZE + (1, 1):
        summary.observe(value, now=0.0)
    assert summary.quantiles((0.0, 0.001), now=0.0) == [1, 7]
    assert summary.count == WINDOW_SIZE + 2


def test_microseconds_are_whole_for_each_duration() -> None:
    duration = MetricDuration()
    duration.add(1_999)
    duration.add(1_999)
    assert (duration.count, duration.ns, duration.us) == (2, 3_998, 2)


def test_a_duration_grows_without_another_count() -> None:
    duration = MetricDuration(1, 1000, 1)
    duration.lengthen(2_500)
    assert (duration.count, duration.ns, duration.us) == (1, 3500, 3)


def control(family: str, *buckets: float) -> MetricControl:
    return MetricControl(
        metric_identifier=MetricIdentifier(family=family),
        histogram_options=HistogramOptions(buckets=buckets),
    )


@pytest.mark.parametrize(
    ("controls", "bounds"),
    [
        ((), FIRST_RESPONSE_BUCKETS_MS),
        ((control("another", 1.0),), FIRST_RESPONSE_BUCKETS_MS),
        ((control("another", 1.0), control(FIRST_RESPONSE_MS, 5.0, 50.0)), (5.0, 50.0)),
    ],
)
def test_a_config_may_choose_the_buckets_of_the_first_response(
    controls: tuple[MetricControl, ...], bounds: tuple[float, ...]
) -> None:
    config = ModelConfig(name="m", model_metrics=ModelMetrics(metric_control=controls))
    assert ModelStatistics.of(config).first_response_ms.bounds == bounds


def test_summaries_are_kept_only_if_they_are_wanted() -> None:
    assert ModelStatistics.of(ModelConfig(name="m")).summaries is None
    assert ModelStatistics.of(ModelConfig(name="m"), summaries=True).summaries is not None


def test_only_a_decoupled_model_has_rows_per_response() -> None:
    policy = TransactionPolicy(decoupled=True)
    plain = ModelStatistics.of(ModelConfig(name="m"))
    assert plain.response(0) is None
    statistics = ModelStatistics.of(ModelConfig(name="m", model_transaction_policy=policy))
    assert statistics.response(1) is statistics.response(1)
    assert len(statistics.responses or ()) == 2


def test_a_long_answer_does_not_make_rows_without_end() -> None:
    statistics = ModelStatistics(responses=[])
    assert statistics.response(MAX_RESPONSE_ROWS - 1) is not None
    assert statistics.response(MAX_RESPONSE_ROWS) is None
    assert len(statistics.responses or ()) == MAX_RESPONSE_ROWS


def test_an_execution_counts_and_has_a_time() -> None:
    statistics = ModelStatistics()
    statistics.executed(3, Phases(1, 2, 3))
    assert statistics.execution_count == 1
    assert statistics.last_inference_ms > 1_600_000_000_000
    assert statistics.batches[3].compute_infer.ns == 2


@pytest.mark.parametrize(
    ("code", "text", "started", "reason"),
    [
        (Code.CANCELLED, "left", False, FailureReason.CANCELED),
        (Code.CANCELLED, "left", True, FailureReason.CANCELED),
        (Code.INTERNAL, "broken", True, FailureReason.BACKEND),
        (
            Code.UNAVAILABLE,
            "[id 7] Request timeout expired",
            False,
            FailureReason.REJECTED,
        ),
        (
            Code.UNAVAILABLE,
            "timeout of the corresponding sequence has been expired",
            False,
            FailureReason.REJECTED,
        ),
        (Code.UNAVAILABLE, "the server is shutting down", False, FailureReason.OTHER),
    ],
)
def test_a_failure_has_a_reason(
    code: Code, text: str, started: bool, reason: FailureReason
) -> None:
    assert failure_reason(InferenceError(code, text), started=started) is reason


def test_a_refusal_for_too_many_requests_is_a_failure() -> None:
    statistics = ModelStatistics()
    statistics.rejected()
    assert statistics.failures[FailureReason.REJECTED] == 1
    assert (statistics.fail.count, statistics.fail.ns) == (1, 0)


DURATIONS = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)


def test_a_row_without_traffic_is_complete() -> None:
    row = statistics_row("m", "1", ModelStatistics())
    assert row == {
        "name": "m",
        "version": "1",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": {name: {"count": 0, "ns": 0} for name in DURATIONS},
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


async def test_a_row_counts_requests_inferences_and_executions(serve: Serve) -> None:
    config: ModelConfig = TEXT
    instance = ScriptedInstance(concurrency=1)
    model = serve(instance, config=config)
    for outcome in ("one", "two", InferenceError(Code.INTERNAL, "broken")):
        with model.submit(text_request()) as stream:
            execution = await instance.begun()
            if isinstance(outcome, InferenceError):
                execution.crash(outcome)
            else:
                execution.finish(outcome)
            await soon(asyncio.gather(read_all(stream), return_exceptions=True))
    await soon(execution.stopped.wait())
    await soon(model.requests.drained())
    row = statistics_row("m", "1", model.statistics)
    counts = {name: row["inference_stats"][name]["count"] for name in DURATIONS}
    assert counts == {
        "success": 2,
        "fail": 1,
        "queue": 2,
        "compute_input": 2,
        "compute_infer": 2,
        "compute_output": 2,
        "cache_hit": 0,
        "cache_miss": 0,
    }
    assert (row["inference_count"], row["execution_count"]) == (2, 3)
    assert row["last_inference"] > 1_600_000_000_000, "milliseconds since the epoch"
    (batch,) = row["batch_stats"]
    assert (batch["batch_size"], batch["compute_infer"]["count"]) == (1, 3)


def test_batches_are_listed_by_size() -> None:
    statistics = ModelStatistics()
    for size in (8, 1, 4, 1):
        statistics.executed(size, Phases(10, 1000, 20))
    row = statistics_row("m", "1", statistics)
    assert [(each["batch_size"], each["compute_infer"]) for each in row["batch_stats"]] == [
        (1, {"count": 2, "ns": 2000}),
        (4, {"count": 1, "ns": 1000}),
        (8, {"count": 1, "ns": 1000}),
    ]


def test_a_batch_has_its_phases() -> None:
    statistics = ModelStatistics()
    statistics.executed(2, Phases(10, 1000, 20))
    statistics.executed(2, Phases(10, 1000, 20))
    assert statistics_row("m", "1", statistics)["batch_stats"] == [
        {
            "batch_size": 2,
            "compute_input": {"count": 2, "ns": 20},
            "compute_infer": {"count": 2, "ns": 2000},
            "compute_output": {"count": 2, "ns": 40},
        }
    ]


def test_memory_is_shown_if_a_backend_reports_it() -> None:
    statistics = ModelStatistics(memory=[MemoryUsage("GPU", 1, 4096)])
    row = statistics_row("m", "1", statistics)
    assert row["memory_usage"] == [{"type": "GPU", "id": 1, "byte_size": 4096}]


def test_responses_have_one_row_per_index() -> None:
    statistics = ModelStatistics(responses=[])
    for index in (0, 1):
        row = statistics.response(index)
        assert row is not None
        row.success.add(7)
    found = statistics_row("m", "1", statistics)["response_stats"]
    assert list(found) == ["0", "1"]
    nothing = {name: {"count": 0, "ns": 0} for name in RESPONSE_DURATIONS}
    assert found["1"] == nothing | {"success": {"count": 1, "ns": 7}}


def test_a_full_row_is_a_message_as_well() -> None:
    statistics = ModelStatistics(responses=[], memory=[MemoryUsage("CPU", 0, 1)])
    statistics.response(0)
    statistics.executed(2, Phases(1, 2, 3))
    row = statistics_row("m", "1", statistics)
    message = pb.ModelStatistics(**row)
    told = json_format.MessageToDict(message, preserving_proto_field_name=True)
    assert told["response_stats"].keys() == {"0"}
    assert told["memory_usage"] == [{"type": "CPU", "byte_size": "1"}]
    assert told["batch_stats"][0]["compute_output"] == {"count": "1", "ns": "3"}
