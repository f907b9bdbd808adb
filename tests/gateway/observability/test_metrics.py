"""The metrics page, as scripts and dashboards read it: text, line by line."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.messages import InferResponse, Usage
from gateway.observability.exposition import render
from gateway.observability.machine import MACHINE
from gateway.observability.metrics import (
    CACHE_GAUGES,
    DOCUMENTED,
    LATENCY_HISTOGRAMS,
    LATENCY_SUMMARIES,
    MODEL_CACHE_COUNTERS,
    MODEL_GAUGES,
    CacheReading,
    FrontendsReading,
    ModelReading,
    RecordingsReading,
    families,
)
from gateway.observability.statistics import FailureReason, ModelStatistics, Summaries
from gateway.settings import MetricsSettings
from tests.builders import new_entry


def reading(
    name: str = "m",
    version: str = "1",
    statistics: ModelStatistics | None = None,
    *,
    in_flight: int = 0,
    ready: bool = True,
    runtime: list[Metric] | None = None,
    **fields: Any,
) -> ModelReading:
    return ModelReading(
        name=name,
        version=version,
        statistics=statistics or ModelStatistics(),
        in_flight=in_flight,
        ready=ready,
        families=runtime or [],
        **fields,
    )


EVERYTHING = MetricsSettings(histogram_latencies=True, summary_latencies=True)
RECORDED = RecordingsReading(recordings=1, byte_size=2, resumed=3, joined=4, expired=5)


def page(*readings: ModelReading, settings: MetricsSettings = EVERYTHING) -> str:
    return render(families(readings, settings)).decode()


def lines(*readings: ModelReading, settings: MetricsSettings = EVERYTHING) -> list[str]:
    return page(*readings, settings=settings).splitlines()


def samples(*readings: ModelReading, settings: MetricsSettings = EVERYTHING) -> list[str]:
    return [line for line in lines(*readings, settings=settings) if not line.startswith("#")]


def shown(*readings: ModelReading, settings: MetricsSettings = EVERYTHING) -> set[str]:
    """The families on the page."""
    every = lines(*readings, settings=settings)
    return {line.split()[2] for line in every if line.startswith("# TYPE")}


# From load.


def test_without_models_there_is_no_family_at_all() -> None:
    assert render(families([], EVERYTHING)) == b""


@pytest.mark.parametrize(
    "line",
    [
        'nv_inference_request_success{model="m",version="1"} 0',
        'nv_inference_request_failure{model="m",reason="REJECTED",version="1"} 0',
        'nv_inference_request_failure{model="m",reason="CANCELED",version="1"} 0',
        'nv_inference_request_failure{model="m",reason="BACKEND",version="1"} 0',
        'nv_inference_request_failure{model="m",reason="OTHER",version="1"} 0',
        'nv_inference_count{model="m",version="1"} 0',
        'nv_inference_exec_count{model="m",version="1"} 0',
        'nv_inference_request_duration_us{model="m",version="1"} 0',
        'nv_inference_queue_duration_us{model="m",version="1"} 0',
        'nv_inference_compute_input_duration_us{model="m",version="1"} 0',
        'nv_inference_compute_infer_duration_us{model="m",version="1"} 0',
        'nv_inference_compute_output_duration_us{model="m",version="1"} 0',
        'nv_inference_pending_request_count{model="m",version="1"} 0',
        'nv_inference_first_response_histogram_ms_bucket{model="m",version="1",le="100"} 0',
        'nv_inference_first_response_histogram_ms_bucket{model="m",version="1",le="500"} 0',
        'nv_inference_first_response_histogram_ms_bucket{model="m",version="1",le="2000"} 0',
        'nv_inference_first_response_histogram_ms_bucket{model="m",version="1",le="5000"} 0',
        'nv_inference_first_response_histogram_ms_bucket{model="m",version="1",le="+Inf"} 0',
        'gateway_wasted_tokens_total{model="m",version="1"} 0',
        'gateway_requests_in_flight{model="m",version="1"} 0',
        'gateway_model_ready{model="m",version="1"} 1',
    ],
)
def test_a_loaded_model_has_its_series_from_the_beginning(line: str) -> None:
    assert line in samples(reading())


def test_a_family_stands_behind_its_help_and_type() -> None:
    found = lines(reading())
    at = found.index("# TYPE nv_inference_request_success counter")
    assert found[at - 1] == (
        "# HELP nv_inference_request_success "
        "Number of successful inference requests, all batch sizes"
    )
    assert found[at + 1] == 'nv_inference_request_success{model="m",version="1"} 0'


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nv_inference_request_failure", "counter"),
        ("nv_inference_queue_duration_us", "counter"),
        ("nv_inference_pending_request_count", "gauge"),
        ("nv_inference_first_response_histogram_ms", "histogram"),
        ("gateway_requests_in_flight", "gauge"),
        ("gateway_wasted_tokens_total", "counter"),
    ],
)
def test_a_family_has_its_type(name: str, kind: str) -> None:
    assert lines(reading()).count(f"# TYPE {name} {kind}") == 1


def test_the_page_has_the_documented_metrics_only() -> None:
    plain = reading("a", statistics=ModelStatistics(summaries=Summaries()), load_secs=1.5)
    cached = reading("b", statistics=ModelStatistics(summaries=Summaries()), cached=True)
    cache = CacheReading(utilization=0.5)
    frontends = FrontendsReading(up=2, restarts=1)
    found = families([plain, cached], EVERYTHING, cache, RECORDED, frontends)
    assert {family.name for family in found} == set(DOCUMENTED) - set(MACHINE)


def test_streams_that_can_be_resumed_are_counted() -> None:
    found = render(families([], EVERYTHING, recordings=RECORDED)).decode().splitlines()
    assert [line for line in found if not line.startswith("#")] == [
        "gateway_recordings 1",
        "gateway_recorded_bytes 2",
        "gateway_resumed_total 3",
        "gateway_joined_total 4",
        "gateway_expired_total 5",
    ]
    assert "# TYPE gateway_recordings gauge" in found
    assert "# TYPE gateway_expired_total counter" in found


def test_processes_that_have_the_connections_are_counted() -> None:
    frontends = FrontendsReading(up=2, restarts=1)
    found = render(families([], EVERYTHING, frontends=frontends)).decode().splitlines()
    assert [line for line in found if not line.startswith("#")] == [
        "gateway_frontends 2",
        "gateway_frontend_restarts_total 1",
    ]
    assert "# TYPE gateway_frontends gauge" in found
    assert "# TYPE gateway_frontend_restarts_total counter" in found


def test_tritons_counters_have_no_suffix_and_no_time_of_creation() -> None:
    names = {line.partition("{")[0] for line in samples(reading())}
    ours = {name for name in names if name.startswith("nv_")}
    assert not [name for name in ours if name.endswith(("_total", "_created"))]


# Values.


def busy() -> ModelStatistics:
    statistics = ModelStatistics()
    statistics.success.add(5_400_999)
    statistics.queue.add(40_000)
    statistics.compute_input.add(60_000)
    statistics.compute_infer.add(5_000_000)
    statistics.compute_output.add(70_000)
    statistics.inference_count = 7
    statistics.execution_count = 3
    statistics.pending = 2
    statistics.failures[FailureReason.CANCELED] = 4
    statistics.prompt_tokens, statistics.completion_tokens = 11, 12
    statistics.waste(5)
    return statistics


@pytest.mark.parametrize(
    "line",
    [
        'nv_inference_request_success{model="m",version="1"} 1',
        'nv_inference_request_failure{model="m",reason="CANCELED",version="1"} 4',
        'nv_inference_request_failure{model="m",reason="BACKEND",version="1"} 0',
        'nv_inference_count{model="m",version="1"} 7',
        'nv_inference_exec_count{model="m",version="1"} 3',
        'nv_inference_request_duration_us{model="m",version="1"} 5400',
        'nv_inference_queue_duration_us{model="m",version="1"} 40',
        'nv_inference_compute_input_duration_us{model="m",version="1"} 60',
        'nv_inference_compute_infer_duration_us{model="m",version="1"} 5000',
        'nv_inference_compute_output_duration_us{model="m",version="1"} 70',
        'nv_inference_pending_request_count{model="m",version="1"} 2',
        'gateway_prompt_tokens_total{model="m",version="1"} 11',
        'gateway_completion_tokens_total{model="m",version="1"} 12',
        'gateway_wasted_tokens_total{model="m",version="1"} 5',
        'gateway_requests_in_flight{model="m",version="1"} 9',
        'gateway_model_ready{model="m",version="1"} 0',
    ],
)
def test_whole_numbers_have_no_fraction(line: str) -> None:
    assert line in samples(reading(statistics=busy(), in_flight=9, ready=False))


def test_a_histogram_adds_up_from_bucket_to_bucket() -> None:
    statistics = ModelStatistics()
    for elapsed_ms in (50.0, 100.0, 100.5, 4000.0, 6000.0):
        statistics.first_response_ms.observe(elapsed_ms)
    name = "nv_inference_first_response_histogram_ms"
    assert [line for line in samples(reading(statistics=statistics)) if line.startswith(name)] == [
        f'{name}_bucket{{model="m",version="1",le="100"}} 2',
        f'{name}_bucket{{model="m",version="1",le="500"}} 3',
        f'{name}_bucket{{model="m",version="1",le="2000"}} 3',
        f'{name}_bucket{{model="m",version="1",le="5000"}} 4',
        f'{name}_bucket{{model="m",version="1",le="+Inf"}} 5',
        f'{name}_sum{{model="m",version="1"}} 10250.5',
        f'{name}_count{{model="m",version="1"}} 5',
    ]


def test_every_version_has_series_of_its_own_in_one_family() -> None:
    found = lines(reading("a", "1"), reading("a", "2"), reading("b", "1"))
    name = "nv_inference_count"
    at = found.index(f"# TYPE {name} counter")
    assert found[at + 1 : at + 4] == [
        f'{name}{{model="a",version="1"}} 0',
        f'{name}{{model="a",version="2"}} 0',
        f'{name}{{model="b",version="1"}} 0',
    ]
    assert found.count(f"# TYPE {name} counter") == 1


def test_labels_are_escaped() -> None:
    assert r'nv_inference_count{model="a\"b\\c\nd",version="1"} 0' in samples(reading('a"b\\c\nd'))


# What is shown, and of what.


def test_tags_and_the_namespace_are_labels() -> None:
    labels = {"_team": "search", "_a": "1", "namespace": "/models"}
    found = samples(reading(labels=labels))
    own = '_a="1",_team="search",model="m",namespace="/models"'
    assert f'nv_inference_count{{{own},version="1"}} 0' in found
    assert f'nv_inference_request_failure{{{own},reason="OTHER",version="1"}} 0' in found


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
    Gauge("vllm:lonely", "Nobody.", ["model_name"], registry=registry)
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
