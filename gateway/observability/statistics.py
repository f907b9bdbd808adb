"""Statistics of models (statistics extension): counts, durations, distributions, rows."""

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError, Refusal
from gateway.messages import Phases
from gateway.observability.summaries import Summaries
from gateway.observability.trace import Trace
from gateway.observability.traceparent import NumberedIds, SpanIds

log = logging.getLogger("sluice.metrics")

FIRST_RESPONSE_MS = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
SECONDS_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
OVERHEAD_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5)

MAX_RESPONSE_ROWS = 256
"""Responses of one request that have statistics of their own."""
RESPONSE_DURATIONS = (
    "compute_infer",
    "compute_output",
    "success",
    "fail",
    "empty_response",
    "cancel",
)

QUEUE_TIMEOUT = "Request timeout expired"
"""Part of the error of a request that expired in a queue."""
SEQUENCE_TIMEOUT = "timeout of the corresponding sequence has been expired"
"""The error of a request whose sequence expired before it started."""


class Histogram:
    """Observations counted by bucket; the last bucket is for values above the largest bound."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.exemplars: dict[int, tuple[SpanIds | NumberedIds, int, float, int]] | None = None
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, trace: Trace | None = None, ns: int = 0) -> None:
        """Count one observation, made at `ns` (`time.perf_counter_ns`).

        It is the exemplar of its bucket if its trace becomes spans.
        """
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if trace is not None and trace.ids is not None:
            if self.exemplars is None:
                self.exemplars = {}
            self.exemplars[bucket] = trace.ids, trace.id, value, ns


class FailureReason(StrEnum):
    """The label `reason` of nv_inference_request_failure."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


@dataclass(slots=True)
class Duration:
    """Count and sum of durations."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """Count one duration."""
        self.count += 1
        self.ns += ns


@dataclass(slots=True)
class MetricDuration(Duration):
    """A duration with a metric: `us` adds each in whole microseconds, as Triton does."""

    us: int = 0

    def add(self, ns: int) -> None:
        """Count one duration."""
        self.count += 1
        self.lengthen(ns)

    def lengthen(self, ns: int) -> None:
        """Add time to durations that were counted before."""
        self.ns += ns
        self.us += ns // 1000


def count_each(*counted: tuple[MetricDuration, int]) -> None:
    """Count one duration, in nanoseconds, in each: in one call for a request."""
    for duration, ns in counted:
        duration.count += 1
        duration.ns += ns
        duration.us += ns // 1000


def within(phases: Phases | None, elapsed_ns: int) -> Phases:
    """The phases of an execution of that duration; without phases all of it is inference.

    Phases that a backend measured with another clock are cut to the elapsed time.
    """
    if phases is None:
        return Phases(infer_ns=elapsed_ns)
    if phases.input_ns + phases.infer_ns + phases.output_ns <= elapsed_ns:
        return phases
    input_ns = min(phases.input_ns, elapsed_ns)
    output_ns = min(phases.output_ns, elapsed_ns - input_ns)
    return Phases(input_ns, min(phases.infer_ns, elapsed_ns - input_ns - output_ns), output_ns)


@dataclass(slots=True)
class BatchStatistics:
    """The executions of one batch size."""

    compute_input: MetricDuration = field(default_factory=MetricDuration)
    compute_infer: MetricDuration = field(default_factory=MetricDuration)
    compute_output: MetricDuration = field(default_factory=MetricDuration)


@dataclass(slots=True)
class ResponseStatistics:
    """The responses of one index within their requests (statistics extension)."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Memory of a loaded model; `type` is CPU, CPU_PINNED or GPU, `id` the device."""

    type: str
    id: int
    byte_size: int


@dataclass(slots=True)
class ModelStatistics:
    """The counts of one loaded version (statistics extension of the v2 protocol).

    `pending` counts accepted requests that no instance executes yet. `responses` has one row per
    response index; it is None unless the model is decoupled. `summaries` is None unless enabled.
    `composed` marks an ensemble: its members execute, so it counts one execution per success.
    `calls` are requests of its instances to other models, `refusals` refused ones by reason.
    """

    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    pending: int = 0
    success: MetricDuration = field(default_factory=MetricDuration)
    fail: MetricDuration = field(default_factory=MetricDuration)
    queue: MetricDuration = field(default_factory=MetricDuration)
    compute_input: MetricDuration = field(default_factory=MetricDuration)
    compute_infer: MetricDuration = field(default_factory=MetricDuration)
    compute_output: MetricDuration = field(default_factory=MetricDuration)
    cache_hit: MetricDuration = field(default_factory=MetricDuration)
    cache_miss: MetricDuration = field(default_factory=MetricDuration)
    batches: dict[int, BatchStatistics] = field(default_factory=dict)
    responses: list[ResponseStatistics] | None = None
    memory: list[MemoryUsage] = field(default_factory=list)
    summaries: Summaries | None = None
    composed: bool = False
    failures: dict[FailureReason, int] = field(
        default_factory=lambda: dict.fromkeys(FailureReason, 0)
    )
    prompt_tokens: int = 0
    completion_tokens: int = 0
    wasted_tokens: int = 0
    stalls: int = 0
    calls: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    first_response_ms: Histogram = field(
        default_factory=lambda: Histogram(FIRST_RESPONSE_BUCKETS_MS)
    )
    first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS_BUCKETS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(SECONDS_BUCKETS))
    overhead: Histogram = field(default_factory=lambda: Histogram(OVERHEAD_BUCKETS))

    @classmethod
    def of(cls, config: ModelConfig, *, summaries: bool = False) -> "ModelStatistics":
        """Empty statistics for a model, with the buckets of its config."""
        composed = config.ensemble_scheduling is not None
        return cls(
            responses=[] if config.decoupled and not composed else None,
            composed=composed,
            summaries=Summaries() if summaries else None,
            first_response_ms=Histogram(_first_response_buckets(config)),
        )

    def executed(self, batch_size: int, phases: Phases) -> None:
        """Count one execution, successful or not."""
        self.execution_count += 1
        self.last_inference_ms = time.time_ns() // 1_000_000
        batch = self.batches.get(batch_size)
        if batch is None:
            batch = self.batches[batch_size] = BatchStatistics()
        count_each(
            (batch.compute_input, phases.input_ns),
            (batch.compute_infer, phases.infer_ns),
            (batch.compute_output, phases.output_ns),
        )

    def rejected(self) -> None:
        """Count a request that was refused because too many are in flight."""
        self.fail.add(0)
        self.failures[FailureReason.REJECTED] += 1

    def refuse(self, error: InferenceError) -> None:
        """Count the error of a request by its reason, if it is a refusal of this model itself."""
        if isinstance(error, Refusal) and not error.of_step:
            self.refusals[error.refusal_reason] += 1

    def waste(self, tokens: int) -> None:
        """Count tokens that a runtime made after the client had disconnected."""
        self.wasted_tokens += tokens

    def response(self, index: int) -> ResponseStatistics | None:
        """The row of a response index; None if that index has no row."""
        if self.responses is None or index >= MAX_RESPONSE_ROWS:
            return None
        while len(self.responses) <= index:
            self.responses.append(ResponseStatistics())
        return self.responses[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReading:
    """The values of the response cache; None for those that only a remote server knows.

    These are its utilization, its entries and its evictions.
    """

    utilization: float | None = None
    entries: int | None = 0
    lookups: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int | None = 0
    lookup_us: int = 0
    insertion_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingsReading:
    """The values of resumable streams."""

    recordings: int
    byte_size: int
    resumed: int
    joined: int
    expired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessReading:
    """The values of credentials, TLS, the audit log and the access log, empty or None without.

    `refusals` are refused requests by wire and reason, `reload_failures` those by `keys`, `jwks`
    and `certificates`.
    """

    refusals: Mapping[tuple[str, str], int] = field(default_factory=dict)
    reload_failures: Mapping[str, int] = field(default_factory=dict)
    audit_failures: int | None = None
    access_log_dropped: int | None = None


def failure_reason(error: InferenceError | None, *, started: bool) -> FailureReason:
    """The label for a failed request; `started`: an instance executed it."""
    if error is not None and error.code is Code.CANCELLED:
        return FailureReason.CANCELED
    if started:
        return FailureReason.BACKEND
    if error is not None and error.code is Code.UNAVAILABLE and is_timeout(error.message):
        return FailureReason.REJECTED
    return FailureReason.OTHER


def is_timeout(message: str) -> bool:
    """Whether the error of a request says that it has waited for too long."""
    return QUEUE_TIMEOUT in message or SEQUENCE_TIMEOUT in message


def _first_response_buckets(config: ModelConfig) -> tuple[float, ...]:
    bounds: tuple[float, ...] = FIRST_RESPONSE_BUCKETS_MS
    for control in config.model_metrics.metric_control if config.model_metrics else ():
        identifier, options = control.metric_identifier, control.histogram_options
        if identifier is None or options is None:
            continue
        if identifier.family == FIRST_RESPONSE_MS:
            bounds = tuple(sorted(options.buckets))
        else:
            log.warning(
                "Metric family '%s' in 'metric_identifier' is not a customizable metric",
                identifier.family,
                extra={"model": config.name},
            )
    return bounds


def statistics_row(name: str, version: str, statistics: ModelStatistics) -> dict[str, Any]:
    """One `model_stats` row (statistics extension), with the field names of the message."""
    return {
        "name": name,
        "version": version,
        "last_inference": statistics.last_inference_ms,
        "inference_count": statistics.inference_count,
        "execution_count": statistics.execution_count,
        "inference_stats": {
            "success": _duration(statistics.success),
            "fail": _duration(statistics.fail),
            "queue": _duration(statistics.queue),
            "compute_input": _duration(statistics.compute_input),
            "compute_infer": _duration(statistics.compute_infer),
            "compute_output": _duration(statistics.compute_output),
            "cache_hit": _duration(statistics.cache_hit),
            "cache_miss": _duration(statistics.cache_miss),
        },
        "response_stats": dict(_responses(statistics)),
        "batch_stats": list(_batches(statistics)),
        "memory_usage": [
            {"type": each.type, "id": each.id, "byte_size": each.byte_size}
            for each in statistics.memory
        ],
    }


def _responses(statistics: ModelStatistics) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, row in enumerate(statistics.responses or ()):
        yield str(index), {name: _duration(getattr(row, name)) for name in RESPONSE_DURATIONS}


def _batches(statistics: ModelStatistics) -> Iterator[dict[str, Any]]:
    for size, batch in sorted(statistics.batches.items()):
        yield {
            "batch_size": size,
            "compute_input": _duration(batch.compute_input),
            "compute_infer": _duration(batch.compute_infer),
            "compute_output": _duration(batch.compute_output),
        }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
