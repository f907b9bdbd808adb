"""The metrics page, as scripts and dashboards read it: text, line by line."""

import pytest

from gateway.event_loop import LoopReading
from gateway.observability.exposition import render
from gateway.observability.machine import MACHINE
from gateway.observability.metrics import DOCUMENTED, FrontendsReading, families
from gateway.observability.remote_metrics import REMOTE_METRICS, RemoteReading, remote_families
from gateway.observability.statistics import (
    AccessReading,
    CacheReading,
    ModelStatistics,
    RecordingsReading,
    Summaries,
)
from tests.gateway.observability.metrics_page import EVERYTHING, busy, lines, reading, samples

RECORDED = RecordingsReading(recordings=1, byte_size=2, resumed=3, joined=4, expired=5)


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
    summaries, golden = Summaries(), {"passed": 2}
    plain = reading(
        "a", statistics=ModelStatistics(summaries=summaries), load_secs=1.5, golden=golden
    )
    cached = reading("b", statistics=ModelStatistics(summaries=Summaries()), cached=True)
    cache = CacheReading(utilization=0.5)
    frontends = FrontendsReading(up=2, restarts=1, loops=LoopReading())
    failures = {"keys": 0, "jwks": 1, "certificates": 0}
    access = AccessReading(
        refusals={("http", "wrong"): 1},
        reload_failures=failures,
        audit_failures=0,
        access_log_dropped=0,
    )
    found = families([plain, cached], EVERYTHING, cache, RECORDED, frontends, access)
    remote = RemoteReading(
        up={"s3://b": True},
        byte_count=1,
        requests=1,
        cache_bytes=1,
        cache_hits=1,
        downloads=1,
        download_secs=1,
    )
    found += remote_families(remote)
    assert {family.name for family in found} == {*DOCUMENTED, *REMOTE_METRICS} - set(MACHINE)


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
    frontends = FrontendsReading(up=2, restarts=1, loops=LoopReading())
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
