"""Statistics and metrics over a running server, with the switches of the metrics page.

The expectations on names, labels, counts and their order were checked once against Triton 2.51,
with the same requests to a python model.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.observability.machine import LOOP_METRICS
from tests.conformance.clients import connect
from tests.conformance.models import DECOUPLED, identity
from tests.serving import WAIT_SECS, Serving, http_get, serving, write_model

TAGS = 'metric_tags { key: "team" value: "search" }\nmetric_tags { key: "a" value: "1" }\n'
BUCKETS = """model_metrics { metric_control [ {
  metric_identifier { family: "nv_inference_first_response_histogram_ms" }
  histogram_options { buckets: [ 250, 60000 ] }
} ] }
"""
OWN = '_a="1",_team="search",model="tagged"'
SUMMARY = "nv_inference_request_summary_us"
HISTOGRAM = "nv_inference_first_response_histogram_ms"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose metrics differ in form."""
    folder = tmp_path_factory.mktemp("models")
    batched = identity("FP32", "4") + "max_batch_size: 8\n"
    write_model(folder, "tagged", batched + TAGS + BUCKETS)
    write_model(folder, "three", identity("BYTES", "1", responses=3) + DECOUPLED)
    write_model(folder, "failing", identity("BYTES", "1", fail="no"))
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Serving]:
    """A server that tells everything."""
    flags = ("histogram_latencies=true", "summary_latencies=true", "summary_quantiles=0.5:0.05")
    with serving(models, *(f"--metrics-config={flag}" for flag in flags)) as started:
        yield started


@pytest.fixture(scope="module")
def page(server: Serving, asked: None) -> list[str]:
    """The metrics page after the requests."""
    return metrics_page(server)


def metrics_page(server: Serving) -> list[str]:
    status, body = http_get(server.ports["metrics"], "/metrics")
    assert status == 200
    return body.decode().splitlines()


@pytest.fixture(scope="module")
def asked(server: Serving) -> None:
    """Three requests with one row, one with four, one that is refused, and two that fail."""
    with httpx.Client(base_url=f"{server.http}/v2/models/", timeout=WAIT_SECS) as http:
        for rows, columns, status in ((1, 4, 200),) * 3 + ((4, 4, 200), (1, 5, 400)):
            data = [[1.0] * columns] * rows
            given = {"name": "INPUT", "datatype": "FP32", "shape": [rows, columns], "data": data}
            answer = http.post("tagged/infer", json={"inputs": [given]})
            assert answer.status_code == status, answer.text
        for _ in range(2):
            assert http.post("failing/generate", json={"INPUT": "x"}).status_code == 500
        assert http.post("three/generate_stream", json={"INPUT": "x"}).text.count("data: ") == 3


@pytest.mark.parametrize(
    "line",
    [
        f'nv_inference_request_success{{{OWN},version="1"}} 4',
        f'nv_inference_request_failure{{{OWN},reason="REJECTED",version="1"}} 0',
        f'nv_inference_request_failure{{{OWN},reason="BACKEND",version="1"}} 0',
        f'nv_inference_count{{{OWN},version="1"}} 7',
        f'nv_inference_exec_count{{{OWN},version="1"}} 4',
        f'nv_inference_pending_request_count{{{OWN},version="1"}} 0',
        f'{HISTOGRAM}_bucket{{{OWN},version="1",le="60000"}} 4',
        f'{HISTOGRAM}_bucket{{{OWN},version="1",le="+Inf"}} 4',
        f'{HISTOGRAM}_count{{{OWN},version="1"}} 4',
        f'{SUMMARY}_count{{{OWN},version="1"}} 4',
        'nv_inference_request_success{model="failing",version="1"} 0',
        'nv_inference_request_failure{model="failing",reason="BACKEND",version="1"} 2',
        'nv_inference_exec_count{model="failing",version="1"} 2',
        f'{HISTOGRAM}_count{{model="failing",version="1"}} 2',
        'nv_inference_request_success{model="three",version="1"} 1',
        "nv_pinned_memory_pool_total_bytes 0",
        "nv_pinned_memory_pool_used_bytes 0",
    ],
)
def test_the_page_counts_as_triton_does(page: list[str], line: str) -> None:
    assert line in page


def test_a_summary_has_the_quantiles_that_were_asked_for(page: list[str]) -> None:
    own = re.compile(rf'{SUMMARY}{{{OWN},version="1",quantile="([^"]*)"}} [1-9]\d*')
    found = [match[1] for line in page if (match := own.fullmatch(line))]
    assert found == ["0.5"]


@pytest.mark.own_models("loads and unloads")
def test_the_time_of_a_load_is_a_metric(page: list[str]) -> None:
    (line,) = [line for line in page if line.startswith(f"nv_model_load_duration_secs{{{OWN}")]
    assert 0 < float(line.rpartition(" ")[2]) < 60


def test_the_metrics_show_the_processor_and_memory_of_the_machine(page: list[str]) -> None:
    values = dict(line.split() for line in page if line.startswith("nv_cpu_"))
    assert 0 <= float(values["nv_cpu_utilization"]) <= 1
    total, used = (float(values[f"nv_cpu_memory_{name}_bytes"]) for name in ("total", "used"))
    assert 0 < used < total


def test_the_metrics_show_the_delays_of_the_event_loop(page: list[str]) -> None:
    lines = [line.split() for line in page if line.startswith("gateway_event_loop_")]
    found = {name: float(value) for name, value in lines}
    assert found.keys() == LOOP_METRICS.keys()
    assert 0 <= found["gateway_event_loop_longest_delay_seconds"] < WAIT_SECS


def test_a_family_is_there_once_and_never_without_series(page: list[str]) -> None:
    typed = [line.split()[2] for line in page if line.startswith("# TYPE")]
    assert len(typed) == len(set(typed))
    for name in typed:
        assert [line for line in page if line.startswith(name)], name
    assert not [name for name in typed if name.startswith("nv_cache_")]


@pytest.mark.parametrize("wire", ["http", "grpc"])
async def test_statistics_agree_with_the_page(server: Serving, asked: None, wire: str) -> None:
    async with connect(server, wire) as client:
        (row,) = (await client.statistics("tagged")).model_stats
    stats = row.inference_stats
    assert (row.inference_count, row.execution_count, stats.success.count) == (7, 4, 4)
    assert [stats.queue.count, stats.compute_input.count, stats.compute_infer.count] == [4, 4, 4]
    assert [(each.batch_size, each.compute_infer.count) for each in row.batch_stats] == [
        (1, 3),
        (4, 1),
    ]
    parts = (stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output)
    assert sum(part.ns for part in parts) <= stats.success.ns


@pytest.mark.parametrize("wire", ["http", "grpc"])
async def test_responses_of_a_decoupled_model_are_counted_by_their_index(
    server: Serving, asked: None, wire: str
) -> None:
    async with connect(server, wire) as client:
        (row,) = (await client.statistics("three")).model_stats
        (failing,) = (await client.statistics("failing")).model_stats
    counts = {index: found.success.count for index, found in row.response_stats.items()}
    assert {index: counts[index] for index in ("0", "1", "2")} == {"0": 1, "1": 1, "2": 1}
    assert not failing.response_stats


def test_every_other_page_is_empty(server: Serving) -> None:
    assert http_get(server.ports["metrics"], "/other") == (200, b"")


def test_switches_leave_families_out(models: Path) -> None:
    flags = (
        "--metrics-config=counter_latencies=false",
        "--allow-cpu-metrics=false",
        "--allow-gpu-metrics=false",
    )
    with serving(models, *flags) as started:
        names = {line.partition("{")[0].split()[0] for line in metrics_page(started)}
    assert "nv_inference_request_success" in names
    assert not [name for name in names if re.search("duration_us|_cpu_|_gpu_|summary", name)]
    assert HISTOGRAM not in {name.removesuffix("_bucket") for name in names}


def test_a_metrics_setting_that_cannot_be_ends_the_start(models: Path) -> None:
    started = Serving(models, ["--metrics-config=summary_quantiles=0.5"])
    assert started.wait_ended() == 1
    assert "Invalid option: [0.5]. No ':' delimiter found." in started.text
