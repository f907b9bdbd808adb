"""The page of metrics in OpenMetrics, as a strict reader sees it."""

import time
from collections.abc import Sequence

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from gateway.backend import MetricReading
from gateway.observability.exposition import reads_open_metrics, render, render_open
from gateway.observability.metrics import histogram_samples
from gateway.observability.span_trace import SpanTrace
from gateway.observability.statistics import Histogram
from gateway.observability.trace import FileTrace
from gateway.observability.traceparent import ParentSpan, SpanIds


def traced() -> SpanTrace:
    return SpanTrace(1, SpanIds(ParentSpan(7, 8)), lambda _: None)


def page() -> Sequence[MetricReading]:
    histogram = Histogram((0.5, 1.0, 25.0))
    now = time.perf_counter_ns()
    histogram.observe(0.7, traced(), now)
    histogram.observe(30.0, traced(), now)
    histogram.observe(0.1, FileTrace(2, (), lambda _: None), now)
    times = MetricReading("times", 'Seconds of "x"\\', "histogram")
    times.samples += histogram_samples("times", {"model": 'm"\n'}, histogram)
    counter = MetricReading("gateway_tokens_total", "Tokens", "counter")
    counter.add_sample("gateway_tokens_total", {}, 3)
    of_triton = MetricReading("nv_inference_count", "Inferences", "counter")
    of_triton.add_sample("nv_inference_count", {"model": "m"}, 2)
    summary = MetricReading("short_us", "Microseconds", "summary")
    summary.add_sample("short_us", {"quantile": "1"}, 4)
    return times, counter, of_triton, summary, MetricReading("none", "No samples", "gauge")


def test_the_page_is_openmetrics() -> None:
    text = render_open(page()).decode()
    found = {each.name: each for each in text_string_to_metric_families(text)}
    assert {name: each.type for name, each in found.items()} == {
        "times": "histogram",
        "gateway_tokens": "counter",
        "nv_inference_count": "unknown",
        "short_us": "summary",
    }
    assert [each.name for each in found["gateway_tokens"].samples] == ["gateway_tokens_total"]
    assert [each.name for each in found["nv_inference_count"].samples] == ["nv_inference_count"]
    assert text.endswith("\n# EOF\n")


def test_a_bucket_has_the_trace_of_its_latest_observation() -> None:
    (times, *_) = text_string_to_metric_families(render_open(page()).decode())
    exemplars = {s.labels["le"]: s.exemplar for s in times.samples if "le" in s.labels}
    assert exemplars["0.5"] is exemplars["25.0"] is None
    found = exemplars["1.0"]
    assert (found.labels, found.value) == ({"trace_id": f"{7:032x}"}, 0.7)
    assert exemplars["+Inf"].value == 30


def test_the_text_format_has_no_exemplars() -> None:
    plain = render(page()).decode()
    assert "trace_id" not in plain
    assert 'le="1"} 2\n' in plain


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        ("application/openmetrics-text; version=1.0.0", True),
        ('application/openmetrics-text;version="1.0.0";q=0.5,text/plain;q=0.3', True),
        ("application/openmetrics-text; charset=utf-8; version=1.0.0", True),
        ("application/openmetrics-text; version=0.0.1, text/plain; version=1.0.0", False),
        ("text/html, Application/OpenMetrics-Text ; q=1; version=1.0.0", True),
        ("application/openmetrics-text", False),
        ("application/openmetrics-text; version=1.0.05", False),
        ("text/plain; version=0.0.4", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_a_client_asks_for_openmetrics(accept: str, is_open: bool) -> None:
    assert reads_open_metrics(accept) is is_open


def test_a_long_header_is_read_in_the_time_of_its_length() -> None:
    began = time.process_time()
    assert not reads_open_metrics("application/openmetrics-text;" * 4_000)
    assert time.process_time() - began < 1
