"""Metrics of models, the server's other parts and API keys: names, help texts, values."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from gateway.backend import ExportedMetric, MetricReading, MetricSample
from gateway.event_loop import LoopReading
from gateway.messages import NO_PARAMETERS
from gateway.observability.exemplars import exemplars
from gateway.observability.exposition import number
from gateway.observability.machine import MACHINE
from gateway.observability.statistics import (
    FIRST_RESPONSE_MS,
    AccessReading,
    CacheReading,
    Histogram,
    ModelStatistics,
    RecordingsReading,
)
from gateway.observability.summaries import Summary
from gateway.settings import MetricsSettings

FAILURES = "nv_inference_request_failure"
REQUEST_COUNTERS = {
    "nv_inference_request_success": "Number of successful inference requests, all batch sizes",
    FAILURES: "Number of failed inference requests, all batch sizes",
    "nv_inference_count": "Number of inferences performed (does not include cached requests)",
    "nv_inference_exec_count": "Number of model executions performed (does not include cached "
    "requests)",
}
LATENCY_COUNTERS = {
    "nv_inference_request_duration_us": "Cumulative inference request duration in microseconds "
    "(includes cached requests)",
    "nv_inference_queue_duration_us": "Cumulative inference queuing duration in microseconds "
    "(includes cached requests)",
    "nv_inference_compute_input_duration_us": "Cumulative compute input duration in microseconds "
    "(does not include cached requests)",
    "nv_inference_compute_infer_duration_us": "Cumulative compute inference duration in "
    "microseconds (does not include cached requests)",
    "nv_inference_compute_output_duration_us": "Cumulative inference compute output duration in "
    "microseconds (does not include cached requests)",
}
MODEL_CACHE_COUNTERS = {
    "nv_cache_num_hits_per_model": "Number of cache hits per model",
    "nv_cache_num_misses_per_model": "Number of cache misses per model",
    "nv_cache_hit_duration_per_model": "Total cache hit duration per model, in microseconds",
    "nv_cache_miss_duration_per_model": "Total cache miss (insert+lookup) duration per model, in "
    "microseconds",
}
MODEL_GAUGES = {
    "nv_inference_pending_request_count": "Instantaneous number of pending requests awaiting "
    "execution per-model.",
    "nv_model_load_duration_secs": "Model load time in seconds",
}
CACHE_GAUGES = {
    "nv_cache_util": "Cache utilization [0.0 - 1.0]",
    "nv_cache_num_entries": "Number of responses stored in response cache",
    "nv_cache_num_lookups": "Number of cache lookups in response cache",
    "nv_cache_num_hits": "Number of cache hits in response cache",
    "nv_cache_num_misses": "Number of cache misses in response cache",
    "nv_cache_num_evictions": "Number of cache evictions in response cache",
    "nv_cache_lookup_duration": "Total cache lookup duration (hit and miss), in microseconds",
    "nv_cache_insertion_duration": "Total cache insertion duration, in microseconds",
}
LATENCY_HISTOGRAMS = {
    FIRST_RESPONSE_MS: "Duration from request to first response in milliseconds",
}
LATENCY_SUMMARIES = {
    "nv_inference_request_summary_us": "Summary of inference request duration in microseconds "
    "(includes cached requests)",
    "nv_inference_queue_summary_us": "Summary of inference queuing duration in microseconds "
    "(includes cached requests)",
    "nv_inference_compute_input_summary_us": "Summary of compute input duration in microseconds "
    "(does not include cached requests)",
    "nv_inference_compute_infer_summary_us": "Summary of compute inference duration in "
    "microseconds (does not include cached requests)",
    "nv_inference_compute_output_summary_us": "Summary of inference compute output duration in "
    "microseconds (does not include cached requests)",
    "nv_cache_hit_summary_per_model": "Summary of cache hit duration per model, in microseconds",
    "nv_cache_miss_summary_per_model": "Summary of cache miss duration per model, in microseconds",
}
SLUICE_COUNTERS = {
    "gateway_prompt_tokens_total": "Prompt tokens of requests that got a response",
    "gateway_completion_tokens_total": "Tokens made for requests",
    "gateway_wasted_tokens_total": "Tokens made for a client that disconnected before it read them",
    "sluice_stalls_total": "Instances restarted because their executions made no progress",
}
GOLDEN = "gateway_golden_requests"
SLUICE_GAUGES = {
    "gateway_requests_in_flight": "Requests accepted and not yet ended",
    "gateway_model_ready": "1 if the model serves requests, else 0",
    GOLDEN: "Golden requests of the last load by outcome",
    "sluice_oldest_request_seconds": "Age of the oldest request in flight in seconds, 0 if there "
    "is none",
}
SLUICE_HISTOGRAMS = {
    "gateway_time_to_first_token_seconds": "Seconds from request to the first tokens",
    "gateway_inter_token_seconds": "Seconds per token between the responses of a request",
    "gateway_overhead_seconds": "Seconds of a request's first response spent in the gateway, "
    "outside the engine",
}
"""Triton lacks the SLUICE_ metrics, and those of recordings, frontends and access."""

RECORDING_GAUGES = {
    "gateway_recordings": "Streams that a client can resume",
    "gateway_recorded_bytes": "Bytes kept of these streams",
}
RECORDING_COUNTERS = {
    "gateway_resumed_total": "Streams that a client has resumed",
    "gateway_joined_total": "Requests that joined another one with their idempotency key",
    "gateway_expired_total": "Streams cancelled because no client resumed them in time",
}
FRONTEND_GAUGES = {"gateway_frontends": "Frontend processes that answer"}
FRONTEND_COUNTERS = {
    "gateway_frontend_restarts_total": "Frontend processes started in place of one that ended"
}
ACCESS_COUNTERS = {
    "gateway_auth_failures_total": "Requests refused for their credential, by wire and reason",
    "gateway_keys_reload_failures_total": "Changed key files that could not be used",
    "gateway_jwks_reload_failures_total": "JWK sets that could not be fetched or used",
    "gateway_certificates_reload_failures_total": "Changed certificates of TLS that could not be "
    "used",
    "gateway_audit_failures_total": "Changes of the server without a line in the audit log",
    "gateway_access_log_dropped_total": "Requests without a line in the access log",
}
NAMES_BY_KIND = {
    "counter": REQUEST_COUNTERS
    | LATENCY_COUNTERS
    | MODEL_CACHE_COUNTERS
    | SLUICE_COUNTERS
    | RECORDING_COUNTERS
    | FRONTEND_COUNTERS
    | ACCESS_COUNTERS,
    "gauge": MODEL_GAUGES | CACHE_GAUGES | SLUICE_GAUGES | RECORDING_GAUGES | FRONTEND_GAUGES,
    "histogram": LATENCY_HISTOGRAMS | SLUICE_HISTOGRAMS,
    "summary": LATENCY_SUMMARIES,
}
PAGE_ORDER = (
    *(*REQUEST_COUNTERS, *LATENCY_COUNTERS, *MODEL_CACHE_COUNTERS, *MODEL_GAUGES, *CACHE_GAUGES),
    *(*LATENCY_HISTOGRAMS, *LATENCY_SUMMARIES),
    *(*SLUICE_COUNTERS, *SLUICE_GAUGES, *SLUICE_HISTOGRAMS),
    *(*RECORDING_GAUGES, *RECORDING_COUNTERS, *FRONTEND_GAUGES, *FRONTEND_COUNTERS),
    *ACCESS_COUNTERS,
)
DOCUMENTED = {name: text for names in NAMES_BY_KIND.values() for name, text in names.items()}
DOCUMENTED |= MACHINE
"""All families of the gateway, with their help texts."""


@dataclass(frozen=True, slots=True)
class ModelReading:
    """The values of one loaded version, with the families of its runtime.

    `labels` are added to `model` and `version`: `_tag` for each of the config's metric_tags, and
    `namespace`. `cached`: the response cache is enabled. `load_secs` is 0 if it was not measured.
    `oldest_secs` is the age of the oldest request in flight. `golden` counts golden requests by
    outcome.
    """

    name: str
    version: str
    statistics: ModelStatistics
    in_flight: int
    ready: bool
    families: Sequence[ExportedMetric] = ()
    labels: Mapping[str, str] = field(default_factory=lambda: NO_PARAMETERS)
    cached: bool = False
    load_secs: float = 0.0
    oldest_secs: float = 0.0
    golden: Mapping[str, int] = field(default_factory=lambda: NO_PARAMETERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendsReading:
    """The values of frontend processes; `loops` are the blocks of their event loops together."""

    up: int
    restarts: int
    loops: LoopReading


class FleetMember(Protocol):
    """The part of a server in a fleet: a router, or the port of a replica."""

    def describe(self) -> dict[str, Any]:
        """The present fleet as members of JSON, without secrets."""

    def families(self) -> list[MetricReading]:
        """The metrics of the fleet."""


def families(
    readings: Iterable[ModelReading],
    settings: MetricsSettings,
    cache: CacheReading | None = None,
    recordings: RecordingsReading | None = None,
    frontends: FrontendsReading | None = None,
    access: AccessReading | None = None,
) -> list[MetricReading]:
    """All families: those of the gateway, then those of runtimes, merged by name."""
    kinds = {name: kind for kind, names in NAMES_BY_KIND.items() for name in names}
    by_name = {name: MetricReading(name, DOCUMENTED[name], kinds[name]) for name in PAGE_ORDER}
    values = (*_cache_values(cache), *_recording_values(recordings), *_frontend_values(frontends))
    for name, value in values:
        by_name[name].add_sample(name, {}, value)
    for name, labels, value in _access_values(access):
        by_name[name].add_sample(name, labels, value)
    for reading in readings:
        for name, samples in _samples(reading, settings):
            by_name[name].samples.extend(samples)
        for family in reading.families:
            _merge(by_name, family)
    return [family for family in by_name.values() if family.samples]


def _merge(by_name: dict[str, MetricReading], family: ExportedMetric) -> None:
    known = by_name.setdefault(
        family.name, MetricReading(family.name, family.documentation, family.type)
    )
    known.samples.extend(family.samples)


def _cache_values(cache: CacheReading | None) -> Iterator[tuple[str, float]]:
    if cache is None:
        return
    if cache.utilization is not None:
        yield "nv_cache_util", cache.utilization
    if cache.entries is not None:
        yield "nv_cache_num_entries", cache.entries
    yield "nv_cache_num_lookups", cache.lookups
    yield "nv_cache_num_hits", cache.hits
    yield "nv_cache_num_misses", cache.misses
    if cache.evictions is not None:
        yield "nv_cache_num_evictions", cache.evictions
    yield "nv_cache_lookup_duration", cache.lookup_us
    yield "nv_cache_insertion_duration", cache.insertion_us


def _recording_values(found: RecordingsReading | None) -> Iterator[tuple[str, float]]:
    if found is None:
        return
    yield "gateway_recordings", found.recordings
    yield "gateway_recorded_bytes", found.byte_size
    yield "gateway_resumed_total", found.resumed
    yield "gateway_joined_total", found.joined
    yield "gateway_expired_total", found.expired


def _access_values(found: AccessReading | None) -> Iterator[tuple[str, dict[str, str], float]]:
    if found is None:
        return
    for (wire, reason), count in found.refusals.items():
        yield "gateway_auth_failures_total", {"wire": wire, "reason": reason}, count
    for kind, count in found.reload_failures.items():
        yield f"gateway_{kind}_reload_failures_total", {}, count
    if found.audit_failures is not None:
        yield "gateway_audit_failures_total", {}, found.audit_failures
    if found.access_log_dropped is not None:
        yield "gateway_access_log_dropped_total", {}, found.access_log_dropped


def _frontend_values(found: FrontendsReading | None) -> Iterator[tuple[str, float]]:
    if found is None:
        return
    yield "gateway_frontends", found.up
    yield "gateway_frontend_restarts_total", found.restarts


def _samples(
    reading: ModelReading, settings: MetricsSettings
) -> Iterator[tuple[str, Iterable[MetricSample]]]:
    labels = {**reading.labels, "model": reading.name, "version": reading.version}
    for reason, count in reading.statistics.failures.items():
        yield FAILURES, (MetricSample(FAILURES, {**labels, "reason": reason.value}, count),)
    for outcome, count in reading.golden.items():
        yield GOLDEN, (MetricSample(GOLDEN, {**labels, "outcome": outcome}, count),)
    for name, value in _values(reading, settings):
        yield name, (MetricSample(name, labels, value),)
    for name, histogram in _histograms(reading.statistics, settings):
        yield name, histogram_samples(name, labels, histogram)
    for name, summary in _summaries(reading):
        yield name, _summary_samples(name, labels, summary, settings.summary_quantiles)


def _values(reading: ModelReading, settings: MetricsSettings) -> Iterator[tuple[str, float]]:
    statistics = reading.statistics
    yield "nv_inference_request_success", statistics.success.count
    yield "nv_inference_count", statistics.inference_count
    yield "nv_inference_exec_count", statistics.execution_count
    if settings.counter_latencies:
        yield from _latencies(statistics)
        if reading.cached:
            yield from _model_cache_values(statistics)
    yield "nv_inference_pending_request_count", statistics.pending
    if reading.load_secs:
        yield "nv_model_load_duration_secs", reading.load_secs
    yield "gateway_prompt_tokens_total", statistics.prompt_tokens
    yield "gateway_completion_tokens_total", statistics.completion_tokens
    yield "gateway_wasted_tokens_total", statistics.wasted_tokens
    yield "gateway_requests_in_flight", reading.in_flight
    yield "gateway_model_ready", int(reading.ready)
    yield "sluice_oldest_request_seconds", reading.oldest_secs
    yield "sluice_stalls_total", statistics.stalls


def _latencies(statistics: ModelStatistics) -> Iterator[tuple[str, float]]:
    yield "nv_inference_request_duration_us", statistics.success.us
    yield "nv_inference_queue_duration_us", statistics.queue.us
    yield "nv_inference_compute_input_duration_us", statistics.compute_input.us
    yield "nv_inference_compute_infer_duration_us", statistics.compute_infer.us
    yield "nv_inference_compute_output_duration_us", statistics.compute_output.us


def _model_cache_values(statistics: ModelStatistics) -> Iterator[tuple[str, float]]:
    yield "nv_cache_num_hits_per_model", statistics.cache_hit.count
    yield "nv_cache_num_misses_per_model", statistics.cache_miss.count
    yield "nv_cache_hit_duration_per_model", statistics.cache_hit.us
    yield "nv_cache_miss_duration_per_model", statistics.cache_miss.us


def _histograms(
    statistics: ModelStatistics, settings: MetricsSettings
) -> Iterator[tuple[str, Histogram]]:
    if settings.histogram_latencies:
        yield FIRST_RESPONSE_MS, statistics.first_response_ms
    yield "gateway_time_to_first_token_seconds", statistics.first_token
    yield "gateway_inter_token_seconds", statistics.inter_token
    yield "gateway_overhead_seconds", statistics.overhead


def _summaries(reading: ModelReading) -> Iterator[tuple[str, Summary]]:
    summaries = reading.statistics.summaries
    if summaries is None:
        return
    if not reading.cached:
        yield "nv_inference_request_summary_us", summaries.request
    yield "nv_inference_queue_summary_us", summaries.queue
    yield "nv_inference_compute_input_summary_us", summaries.compute_input
    yield "nv_inference_compute_infer_summary_us", summaries.compute_infer
    yield "nv_inference_compute_output_summary_us", summaries.compute_output
    if reading.cached:
        yield "nv_cache_hit_summary_per_model", summaries.cache_hit
        yield "nv_cache_miss_summary_per_model", summaries.cache_miss


def histogram_samples(
    name: str, labels: Mapping[str, str], histogram: Histogram
) -> Iterator[MetricSample]:
    """The samples of a histogram: its buckets, its sum and its count."""
    running, found = 0, exemplars(histogram)
    bounds = _bound_texts(histogram.bounds)
    for index, (bound, count) in enumerate(zip(bounds, histogram.counts, strict=True)):
        running += count
        own = {**labels, "le": bound}
        yield MetricSample(f"{name}_bucket", own, running, found.get(index))
    yield MetricSample(f"{name}_sum", dict(labels), histogram.total)
    yield MetricSample(f"{name}_count", dict(labels), running)


@lru_cache(64)
def _bound_texts(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(number(bound) for bound in (*bounds, math.inf))


def _summary_samples(
    name: str, labels: Mapping[str, str], summary: Summary, quantiles: Sequence[float]
) -> Iterator[MetricSample]:
    yield MetricSample(f"{name}_count", dict(labels), summary.count)
    yield MetricSample(f"{name}_sum", dict(labels), summary.total)
    for quantile, value in zip(quantiles, summary.quantiles(tuple(quantiles)), strict=True):
        yield MetricSample(name, {**labels, "quantile": number(quantile)}, value)
