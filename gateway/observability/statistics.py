"""Counts and durations of one model: what the statistics extension and the metrics show."""

import logging
import time
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import Phases
from gateway.observability.distributions import Histogram, Summary

log = logging.getLogger("sluice.metrics")

FIRST_RESPONSE_MS = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
SECONDS_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
OVERHEAD_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5)

MAX_RESPONSE_ROWS = 256
"""Responses of one request that have statistics of their own; a long answer has no end of them."""

QUEUE_TIMEOUT = "Request timeout expired"
"""How the error of a request begins that has waited in a queue for too long."""
SEQUENCE_TIMEOUT = "timeout of the corresponding sequence has been expired"
"""The error of a request whose sequence has waited for too long until it could begin."""


class FailureReason(StrEnum):
    """The label `reason` of nv_inference_request_failure."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


@dataclass(slots=True)
class Duration:
    """How often, and how long in all; `us` sums each duration in whole microseconds, as Triton."""

    count: int = 0
    ns: int = 0
    us: int = 0

    def add(self, ns: int) -> None:
        """Count one more."""
        self.count += 1
        self.ns += ns
        self.us += ns // 1000

    def lengthen(self, ns: int) -> None:
        """Add time to what has been counted already."""
        self.ns += ns
        self.us += ns // 1000


@dataclass(slots=True)
class BatchStatistics:
    """The executions of one batch size."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def add(self, phases: Phases) -> None:
        """Count one execution."""
        self.compute_input.add(phases.input_ns)
        self.compute_infer.add(phases.infer_ns)
        self.compute_output.add(phases.output_ns)


@dataclass(slots=True)
class ResponseStatistics:
    """All the responses that have one index within their requests (statistics extension)."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class Summaries:
    """Quantiles of the durations of requests, in microseconds."""

    request: Summary = field(default_factory=Summary)
    queue: Summary = field(default_factory=Summary)
    compute_input: Summary = field(default_factory=Summary)
    compute_infer: Summary = field(default_factory=Summary)
    compute_output: Summary = field(default_factory=Summary)
    cache_hit: Summary = field(default_factory=Summary)
    cache_miss: Summary = field(default_factory=Summary)


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Memory that a loaded model holds; `type` is CPU, CPU_PINNED or GPU, `id` its device."""

    type: str
    id: int
    byte_size: int


@dataclass(slots=True)
class ModelStatistics:
    """What one loaded version has done (statistics extension of the v2 protocol).

    `pending` counts requests accepted and not yet handed to an instance. `responses` has a row for
    each index of a response, and is None for a model whose requests have one response.
    `summaries` is None unless they are wanted. `composed` is that of an ensemble: its executions
    are those of its members, so that it has one for each request that succeeds.
    """

    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    pending: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
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
    first_response_ms: Histogram = field(
        default_factory=lambda: Histogram(FIRST_RESPONSE_BUCKETS_MS)
    )
    first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS_BUCKETS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(SECONDS_BUCKETS))
    overhead: Histogram = field(default_factory=lambda: Histogram(OVERHEAD_BUCKETS))

    @classmethod
    def of(cls, config: ModelConfig, *, summaries: bool = False) -> "ModelStatistics":
        """Those of a model that is about to serve, with the buckets that its config asks for."""
        composed = config.ensemble_scheduling is not None
        return cls(
            responses=[] if config.decoupled and not composed else None,
            composed=composed,
            summaries=Summaries() if summaries else None,
            first_response_ms=Histogram(_first_response_buckets(config)),
        )

    def executed(self, batch_size: int, phases: Phases) -> None:
        """One execution has ended, successful or not."""
        self.execution_count += 1
        self.last_inference_ms = time.time_ns() // 1_000_000
        batch = self.batches.get(batch_size)
        if batch is None:
            batch = self.batches[batch_size] = BatchStatistics()
        batch.add(phases)

    def rejected(self) -> None:
        """A request was refused because there are too many."""
        self.fail.add(0)
        self.failures[FailureReason.REJECTED] += 1

    def waste(self, tokens: int) -> None:
        """A runtime made tokens for somebody who had gone."""
        self.wasted_tokens += tokens

    def response(self, index: int) -> ResponseStatistics | None:
        """The row for the responses with this index; None for those that are not told apart."""
        if self.responses is None or index >= MAX_RESPONSE_ROWS:
            return None
        while len(self.responses) <= index:
            self.responses.append(ResponseStatistics())
        return self.responses[index]


def failure_reason(error: InferenceError | None, *, started: bool) -> FailureReason:
    """The label for a failed request; `started`: an instance has executed it."""
    if error is not None and error.code is Code.CANCELLED:
        return FailureReason.CANCELED
    if started:
        return FailureReason.BACKEND
    if error is not None and error.code is Code.UNAVAILABLE and _is_timeout(error.message):
        return FailureReason.REJECTED
    return FailureReason.OTHER


def _is_timeout(message: str) -> bool:
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
