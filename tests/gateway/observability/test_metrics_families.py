"""Families of metrics that options, caches and runtimes add."""

import time
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.messages import InferResponse, Usage
from gateway.observability.exposition import render
from gateway.observability.metrics import (
    CACHE_GAUGES,
    LATENCY_HISTOGRAMS,
    LATENCY_SUMMARIES,
    MODEL_CACHE_COUNTERS,
    MODEL_GAUGES,
    ModelReading,
    families,
)
from gateway.observability.statistics import CacheReading, ModelStatistics
from gateway.observability.summaries import Summaries
from gateway.settings import MetricsSettings
from tests.builders import new_entry
from tests.gateway.observability.metrics_page import EVERYTHING, busy, lines, page, reading, samples


def shown(*readings: ModelReading, settings: MetricsSettings = EVERYTHING) -> set[str]:
    """The families on the page."""
    every = lines(*readings, settings=settings)
    return {line.split()[2] for line in every if line.startswith("# TYPE")}


def test_by_default_there_are_counters_of_latencies_and_nothing_more() -> None:
    statistics = ModelStatistics()
    found = shown(reading(statistics=statistics), settings=MetricsSettings())
    assert "nv_inference_request_duration_us" in found
    assert not found & {*LATENCY_HISTOGRAMS, *LATENCY_SUMMARIES}


def test_counters_of_latencies_may_be_disabled() -> None:
    cached = reading(statistics=busy(), cached=True)
    found = shown(cached, settings=MetricsSettings(counter_latencies=False))
    assert not [name for name in found if "duration" in name or name in MODEL_CACHE_COUNTERS]
    assert found >= {"nv_inference_request_success", "nv_inference_request_failure"}


def test_a_load_time_is_shown_after_a_load() -> None:
    assert "nv_model_load_duration_secs" in MODEL_GAUGES
    assert "nv_model_load_duration_secs" not in shown(reading())
    line = 'nv_model_load_duration_secs{model="m",version="1"} 1.25'
    assert line in samples(reading(load_secs=1.25))


def test_a_model_with_a_cache_has_its_counters() -> None:
    statistics = busy()
    statistics.cache_hit.add(2_500)
    statistics.cache_miss.add(3_999)
    found = samples(reading(statistics=statistics, cached=True))
    for line in (
        'nv_cache_num_hits_per_model{model="m",version="1"} 1',
        'nv_cache_num_misses_per_model{model="m",version="1"} 1',
        'nv_cache_hit_duration_per_model{model="m",version="1"} 2',
        'nv_cache_miss_duration_per_model{model="m",version="1"} 3',
    ):
        assert line in found
    assert not shown(reading()) & {*MODEL_CACHE_COUNTERS, *CACHE_GAUGES}


def test_the_cache_of_the_server_has_gauges_without_labels() -> None:
    cache = CacheReading(utilization=0.25, entries=3, lookups=9, hits=4, misses=5, evictions=1)
    found = render(families([], MetricsSettings(), cache)).decode().splitlines()
    assert "# TYPE nv_cache_util gauge" in found
    for line in ("nv_cache_util 0.25", "nv_cache_num_entries 3", "nv_cache_num_evictions 1"):
        assert line in found


def test_a_cache_without_a_size_has_no_utilization() -> None:
    found = {family.name for family in families([], MetricsSettings(), CacheReading())}
    assert found == set(CACHE_GAUGES) - {"nv_cache_util"}


def test_a_summary_has_count_sum_and_quantiles() -> None:
    statistics = ModelStatistics(summaries=Summaries())
    assert statistics.summaries is not None
    for value in (7, 8, 9):
        statistics.summaries.queue.observe(value, time.monotonic())
    settings = MetricsSettings(summary_latencies=True, summary_quantiles=(0.5, 0.99))
    name = "nv_inference_queue_summary_us"
    found = lines(reading(statistics=statistics), settings=settings)
    assert [line for line in found if name in line][1:] == [
        f"# TYPE {name} summary",
        f'{name}_count{{model="m",version="1"}} 3',
        f'{name}_sum{{model="m",version="1"}} 24',
        f'{name}{{model="m",version="1",quantile="0.5"}} 8',
        f'{name}{{model="m",version="1",quantile="0.99"}} 9',
    ]


def test_only_models_with_a_cache_have_its_summaries_and_none_of_whole_requests() -> None:
    every = ModelStatistics(summaries=Summaries())
    plain, cached = shown(reading(statistics=every)), shown(reading(statistics=every, cached=True))
    assert plain & set(LATENCY_SUMMARIES) == {
        name for name in LATENCY_SUMMARIES if "inference" in name
    }
    assert cached & set(LATENCY_SUMMARIES) == set(LATENCY_SUMMARIES) - {
        "nv_inference_request_summary_us"
    }


# What runtimes add.


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_the_families_of_a_runtime_follow_as_it_labels_them(registry: CollectorRegistry) -> None:
    gauge = Gauge(
        "vllm:num_requests_running", "Running.", ["model_name", "engine"], registry=registry
    )
    gauge.labels("llama", "0").set(3)
    counter = Counter("vllm:prompt_tokens", "Prompt tokens.", ["model_name"], registry=registry)
    counter.labels("llama").inc(5)
    found = lines(reading(runtime=list(registry.collect())))
    at = found.index("# TYPE vllm:num_requests_running gauge")
    assert found[at + 1] == 'vllm:num_requests_running{engine="0",model_name="llama"} 3'
    at = found.index("# TYPE vllm:prompt_tokens_total counter")
    assert found[at + 1] == 'vllm:prompt_tokens_total{model_name="llama"} 5'
    assert not [line for line in found if "_created" in line]


def test_families_of_one_name_are_merged_across_models() -> None:
    def runtime(model: str) -> list[Metric]:
        registry = CollectorRegistry()
        Gauge("vllm:kv_cache", "Usage.", ["model_name"], registry=registry).labels(model).set(0.5)
        return list(registry.collect())

    found = lines(reading("a", runtime=runtime("a")), reading("b", runtime=runtime("b")))
    at = found.index("# TYPE vllm:kv_cache gauge")
    assert found[at + 1 : at + 3] == [
        'vllm:kv_cache{model_name="a"} 0.5',
        'vllm:kv_cache{model_name="b"} 0.5',
    ]
    assert found.count("# HELP vllm:kv_cache Usage.") == 1


def test_a_family_of_a_runtime_without_series_is_not_shown(registry: CollectorRegistry) -> None:
    Gauge("vllm:lonely", "A family without samples.", ["model_name"], registry=registry)
    assert "vllm:lonely" not in page(reading(runtime=list(registry.collect())))


def test_types_that_the_text_format_lacks_are_mapped(
    registry: CollectorRegistry,
) -> None:
    Info("vllm:cache_config", "Config.", registry=registry).info({"block_size": "16"})
    untyped = Metric("vllm:odd", "Odd.", "unknown")
    untyped.add_sample("vllm:odd", {}, float("nan"))
    found = lines(reading(runtime=[*registry.collect(), untyped]))
    at = found.index("# TYPE vllm:cache_config_info gauge")
    assert found[at + 1] == 'vllm:cache_config_info{block_size="16"} 1'
    at = found.index("# TYPE vllm:odd untyped")
    assert found[at + 1] == "vllm:odd NaN"


def parsed(text: str) -> Iterator[tuple[str, str, float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield family.type, sample.name, sample.value


def test_prometheus_reads_the_page(registry: CollectorRegistry) -> None:
    runtime = Histogram("vllm:e2e_seconds", 'It\'s "e2e"\nin \\ seconds.', registry=registry)
    runtime.observe(0.3)
    statistics = busy()
    record = new_entry(statistics).record
    record.started()
    record.responded(InferResponse(usage=Usage(1, 1)))
    record.ended(None)
    found = list(
        parsed(page(reading('quo"ted', statistics=statistics, runtime=list(registry.collect()))))
    )
    assert ("counter", "nv_inference_request_success_total", 2.0) in found
    assert ("gauge", "gateway_model_ready", 1.0) in found
    assert ("histogram", "gateway_time_to_first_token_seconds_count", 1.0) in found
    assert ("histogram", "vllm:e2e_seconds_sum", 0.3) in found
    assert "unknown" not in {kind for kind, _, _ in found}
