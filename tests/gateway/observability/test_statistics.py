"""What a model counts, and which buckets it counts into."""

import pytest

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
    Duration,
    FailureReason,
    ModelStatistics,
    failure_reason,
)


def test_microseconds_are_whole_for_each_duration() -> None:
    duration = Duration()
    duration.add(1_999)
    duration.add(1_999)
    assert (duration.count, duration.ns, duration.us) == (2, 3_998, 2)


def test_a_duration_grows_without_another_count() -> None:
    duration = Duration(1, 1000, 1)
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


def test_only_a_decoupled_model_tells_its_responses_apart() -> None:
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
