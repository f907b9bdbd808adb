"""Prometheus text: what each family is called, and where its values come from."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from gateway.observability.statistics import Histogram, ModelStatistics

CONTENT_TYPE = "text/plain; charset=utf-8"

COUNTERS = {
    "nv_inference_request_success": "Number of successful inference requests, all batch sizes",
    "nv_inference_count": "Number of inferences performed (does not include cached requests)",
    "nv_inference_exec_count": "Number of model executions performed",
    "nv_inference_request_duration_us": "Cumulative inference request duration in microseconds",
    "nv_inference_queue_duration_us": "Cumulative queuing duration in microseconds",
    "nv_inference_compute_input_duration_us": "Cumulative compute input duration in microseconds",
    "nv_inference_compute_infer_duration_us": "Cumulative compute duration in microseconds",
    "nv_inference_compute_output_duration_us": "Cumulative compute output duration in microseconds",
    "gateway_prompt_tokens_total": "Prompt tokens of requests that got a response",
    "gateway_completion_tokens_total": "Tokens made for requests",
    "gateway_wasted_tokens_total": "Tokens made for a client that had gone before it took them",
}
FAILURES = "nv_inference_request_failure"
GAUGES = {
    "nv_inference_pending_request_count": "Requests accepted and not yet handed to an instance",
    "gateway_requests_in_flight": "Requests accepted and not yet ended",
    "gateway_model_ready": "1 if the model serves requests, else 0",
}
HISTOGRAMS = {
    "nv_inference_first_response_histogram_ms": "Milliseconds from request to first response",
    "gateway_time_to_first_token_seconds": "Seconds from request to the first tokens",
    "gateway_inter_token_seconds": "Seconds per token between the responses of a request",
    "gateway_overhead_seconds": "Seconds of a request's first response spent in the gateway, "
    "outside the engine",
}
DOCUMENTED = {
    **COUNTERS,
    FAILURES: "Number of failed inference requests, all batch sizes",
    **GAUGES,
    **HISTOGRAMS,
}
"""Every family of the gateway's own, with its help text."""

TEXT_TYPES = {
    "gaugehistogram": "histogram",
    "info": "gauge",
    "stateset": "gauge",
    "unknown": "untyped",
}
"""What the text format calls the types that it does not have."""


@dataclass(frozen=True, slots=True)
class ModelReading:
    """One loaded version as metrics see it, with its runtime's own families."""

    name: str
    version: str
    statistics: ModelStatistics
    in_flight: int
    ready: bool
    families: Sequence[Metric] = ()


def families(readings: Sequence[ModelReading]) -> list[Metric]:
    """All families: the gateway's own, then the runtimes', those of one name merged."""
    own = [
        *(_family(name, "counter") for name in COUNTERS),
        _family(FAILURES, "counter"),
        *(_family(name, "gauge") for name in GAUGES),
        *(_family(name, "histogram") for name in HISTOGRAMS),
    ]
    by_name = {family.name: family for family in own}
    for reading in readings:
        for sample in _samples(reading):
            by_name[_family_of(sample.name)].samples.append(sample)
        for family in reading.families:
            _merge(by_name, family)
    return [family for family in by_name.values() if family.samples]


def render(found: Iterable[Metric]) -> bytes:
    """Prometheus text format: labels sorted, whole numbers without a fraction (as Triton)."""
    lines: list[str] = []
    for family in found:
        name = _exposed_name(family)
        lines.append(f"# HELP {name} {_escape_help(family.documentation)}")
        lines.append(f"# TYPE {name} {TEXT_TYPES.get(family.type, family.type)}")
        lines += [_line(s) for s in family.samples if not s.name.endswith("_created")]
    return ("\n".join(lines) + "\n").encode() if lines else b""


def _family(name: str, kind: str) -> Metric:
    return Metric(name, DOCUMENTED[name], kind)


def _merge(by_name: dict[str, Metric], family: Metric) -> None:
    known = by_name.setdefault(family.name, Metric(family.name, family.documentation, family.type))
    known.samples.extend(family.samples)


def _family_of(sample_name: str) -> str:
    for suffix in ("_bucket", "_sum", "_count"):
        if sample_name.removesuffix(suffix) in HISTOGRAMS:
            return sample_name.removesuffix(suffix)
    return sample_name


def _samples(reading: ModelReading) -> Iterator[Sample]:
    labels = {"model": reading.name, "version": reading.version}
    for name, value in _values(reading).items():
        yield Sample(name, labels, value)
    for reason, count in reading.statistics.failures.items():
        yield Sample(FAILURES, {**labels, "reason": reason.value}, count)
    for name, histogram in _histograms(reading.statistics).items():
        yield from _histogram_samples(name, labels, histogram)


def _values(reading: ModelReading) -> dict[str, float]:
    statistics = reading.statistics
    return {
        "nv_inference_request_success": statistics.success.count,
        "nv_inference_count": statistics.inference_count,
        "nv_inference_exec_count": statistics.execution_count,
        "nv_inference_request_duration_us": statistics.success.ns // 1000,
        "nv_inference_queue_duration_us": statistics.queue.ns // 1000,
        "nv_inference_compute_input_duration_us": 0,
        "nv_inference_compute_infer_duration_us": statistics.compute_infer.ns // 1000,
        "nv_inference_compute_output_duration_us": 0,
        "gateway_prompt_tokens_total": statistics.prompt_tokens,
        "gateway_completion_tokens_total": statistics.completion_tokens,
        "gateway_wasted_tokens_total": statistics.wasted_tokens,
        "nv_inference_pending_request_count": statistics.pending,
        "gateway_requests_in_flight": reading.in_flight,
        "gateway_model_ready": int(reading.ready),
    }


def _histograms(statistics: ModelStatistics) -> dict[str, Histogram]:
    return {
        "nv_inference_first_response_histogram_ms": statistics.first_response_ms,
        "gateway_time_to_first_token_seconds": statistics.first_token,
        "gateway_inter_token_seconds": statistics.inter_token,
        "gateway_overhead_seconds": statistics.overhead,
    }


def _histogram_samples(
    name: str, labels: Mapping[str, str], histogram: Histogram
) -> Iterator[Sample]:
    running = 0
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        running += count
        yield Sample(f"{name}_bucket", {**labels, "le": _number(bound)}, running)
    yield Sample(f"{name}_sum", dict(labels), histogram.total)
    yield Sample(f"{name}_count", dict(labels), running)


def _exposed_name(family: Metric) -> str:
    if family.type in ("counter", "info") and family.samples:
        return str(family.samples[0].name)
    return str(family.name)


def _line(sample: Sample) -> str:
    labels = ",".join(f'{key}="{_escape(value)}"' for key, value in sorted(sample.labels.items()))
    braces = f"{{{labels}}}" if labels else ""
    return f"{sample.name}{braces} {_number(sample.value)}"


def _number(value: Any) -> str:
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return str(int(number)) if number.is_integer() else repr(number)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
