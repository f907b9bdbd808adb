"""Counts and durations of one model, recorded once per request where its stream ends."""

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse, Usage

FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
SECONDS_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
OVERHEAD_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5)
NS_PER_SECOND = 1e9


class FailureReason(StrEnum):
    """The label `reason` of nv_inference_request_failure."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


class Histogram:
    """Observations counted by bucket; the last bucket is everything above the largest bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class Duration:
    """How often, and how long in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """Count one more."""
        self.count += 1
        self.ns += ns


@dataclass(slots=True)
class ModelStatistics:
    """What one loaded version has done (statistics extension of the v2 protocol).

    `pending` counts requests accepted and not yet handed to an instance.
    """

    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    pending: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    batches: dict[int, Duration] = field(default_factory=dict)
    failures: dict[FailureReason, int] = field(
        default_factory=lambda: dict.fromkeys(FailureReason, 0)
    )
    prompt_tokens: int = 0
    completion_tokens: int = 0
    wasted_tokens: int = 0
    first_response_ms: Histogram = field(
        default_factory=lambda: Histogram(FIRST_RESPONSE_BUCKETS_MS)
    )
    first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS_BUCKETS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(SECONDS_BUCKETS))
    overhead: Histogram = field(default_factory=lambda: Histogram(OVERHEAD_BUCKETS))

    def executed(self, batch_size: int, ns: int) -> None:
        """One execution has ended, successful or not."""
        self.execution_count += 1
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.batches.setdefault(batch_size, Duration()).add(ns)

    def rejected(self) -> None:
        """A request was refused because there are too many."""
        self.fail.add(0)
        self.failures[FailureReason.REJECTED] += 1

    def waste(self, tokens: int) -> None:
        """A runtime made tokens for somebody who had gone."""
        self.wasted_tokens += tokens


class Record:
    """The account of one request: times as it passes, counts once at its end.

    Implements `StreamRecorder`. Queue time runs from submission to the start of its execution,
    compute time from there to its end, so success time is never less than their sum.
    """

    __slots__ = (
        "_batch_size",
        "_first_ns",
        "_last_ns",
        "_on_end",
        "_received_ns",
        "_started_ns",
        "_statistics",
    )

    def __init__(
        self,
        statistics: ModelStatistics,
        batch_size: int,
        received_ns: int,
        on_end: Callable[["Record"], None],
    ) -> None:
        self._statistics = statistics
        self._batch_size = batch_size
        self._on_end = on_end
        self._received_ns = received_ns or time.perf_counter_ns()
        self._started_ns = 0
        self._first_ns = 0
        self._last_ns = 0
        statistics.pending += 1

    @property
    def batch_size(self) -> int:
        """How many inferences the request counts as."""
        return self._batch_size

    def started(self) -> None:
        """An instance has taken the request."""
        self._started_ns = time.perf_counter_ns()
        self._statistics.pending -= 1

    def responded(self, response: InferResponse) -> None:
        """Time the response, and count its tokens."""
        if self._first_ns and response.usage is None:
            return
        now = time.perf_counter_ns()
        if not self._first_ns:
            self._first_ns = now
            self._statistics.first_response_ms.observe((now - self._received_ns) / 1e6)
        if response.usage is not None:
            self._count_tokens(now, response.usage)

    def wasted(self, response: InferResponse) -> None:
        """Count tokens that nobody waited for."""
        if response.usage is not None:
            self._statistics.completion_tokens += response.usage.completion_tokens
            self._statistics.waste(response.usage.completion_tokens)

    def taken(self) -> None:
        """The frontend has the first response: what was not spent in the engine is overhead."""
        engine_ns = self._first_ns - self._started_ns
        spent_ns = time.perf_counter_ns() - self._received_ns
        self._statistics.overhead.observe(max(0, spent_ns - engine_ns) / NS_PER_SECOND)

    def ended(self, error: InferenceError | None) -> None:
        """Count the request as a success or a failure."""
        now = time.perf_counter_ns()
        if error is None and self._started_ns:
            self._succeed(now)
        else:
            self._fail(now, error)
        if not self._started_ns:
            self._statistics.pending -= 1
        self._on_end(self)

    def _count_tokens(self, now: int, usage: Usage) -> None:
        statistics = self._statistics
        statistics.prompt_tokens += usage.prompt_tokens
        statistics.completion_tokens += usage.completion_tokens
        if not usage.completion_tokens:
            return
        if self._last_ns:
            gap = (now - self._last_ns) / NS_PER_SECOND / usage.completion_tokens
            statistics.inter_token.observe(gap)
        else:
            statistics.first_token.observe((now - self._received_ns) / NS_PER_SECOND)
        self._last_ns = now

    def _succeed(self, now: int) -> None:
        statistics = self._statistics
        statistics.inference_count += self._batch_size
        statistics.success.add(now - self._received_ns)
        statistics.queue.add(self._started_ns - self._received_ns)
        statistics.compute_infer.add(now - self._started_ns)

    def _fail(self, now: int, error: InferenceError | None) -> None:
        self._statistics.fail.add(now - self._received_ns)
        self._statistics.failures[failure_reason(error, started=bool(self._started_ns))] += 1


def failure_reason(error: InferenceError | None, *, started: bool) -> FailureReason:
    """The label for a failed request."""
    if error is not None and error.code is Code.CANCELLED:
        return FailureReason.CANCELED
    return FailureReason.BACKEND if started else FailureReason.OTHER
