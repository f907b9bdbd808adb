"""Replicas of an InferencePool have the metrics that an endpoint picker reads."""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.conformance.models import HOLD, identity, with_parameters
from tests.deploy.chart import CHART
from tests.pickers import FLAGS, QUEUED, RUNNING, USED, PickerMetric, picker_metrics
from tests.serving import ROOT, WAIT_SECS, Serving, held, replica, wait_until, write_model

STAND_IN = ROOT / "tests" / "backends" / "tensorrtllm" / "stand_in"
ALLOW_HTTP = "--allow-http=true"
COUNT = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pool") / "models"
    write_model(folder, "text", identity("BYTES", "1") + with_parameters(HOLD))
    write_model(folder, "llm", 'backend: "tensorrtllm"\n')
    (folder / "llm" / "1" / "model.json").write_text('{"model": "m"}')
    return folder


@pytest.fixture(scope="module")
def text(models: Path) -> Iterator[Serving]:
    """A replica of a model without an engine."""
    with replica(models, "text", ALLOW_HTTP) as started:
        yield started


@pytest.fixture(scope="module")
def llm(models: Path) -> Iterator[Serving]:
    """A replica of a model of TensorRT-LLM, whose library has a stand-in."""
    path = os.pathsep.join([str(STAND_IN), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path.rstrip(os.pathsep)}
    with replica(models, "llm", ALLOW_HTTP, environment=environment) as started:
        yield started


def wait_value(metric: PickerMetric, server: Serving, wanted: float) -> None:
    wait_until(lambda: metric.value(server) == wanted, f"{metric} is {wanted:g}")


def test_the_page_names_the_metrics_by_the_flags_of_the_picker() -> None:
    found = picker_metrics()
    assert list(found) == ["vllm", "openvino_genai", "tensorrtllm", "others"]
    assert list(found["vllm"]) == list(FLAGS)
    assert all(QUEUED in each for each in found.values())


def test_the_port_of_the_page_is_that_of_the_replicas_of_the_chart() -> None:
    template = (CHART / "templates" / "replicas.yaml").read_text()
    (port,) = re.findall(r"- name: metrics\s+containerPort: (\d+)", template)
    page = (ROOT / "deploy" / "README.md").read_text()
    assert f"`--model-server-metrics-port={port}`" in page
    assert "--allow-metrics=true" in template


def test_the_queue_of_a_replica_moves_with_the_load(models: Path, text: Serving) -> None:
    queued = picker_metrics()["others"][QUEUED]
    assert queued.value(text) == 0
    body = {"inputs": [{"name": "INPUT", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}
    with ThreadPoolExecutor(COUNT) as clients:
        with held(models, "text"):
            url = f"{text.http}/v2/models/text/infer"
            asked = [
                clients.submit(httpx.post, url, json=body, timeout=WAIT_SECS) for _ in range(COUNT)
            ]
            wait_value(queued, text, COUNT - 1)  # its only instance executes one
        assert {each.result().status_code for each in asked} == {200}
    wait_value(queued, text, 0)


def test_the_queue_of_a_tensorrt_llm_replica_moves_with_the_load(llm: Serving) -> None:
    metrics = picker_metrics()["tensorrtllm"]
    wait_value(metrics[USED], llm, 0.25)
    at_rest = (metrics[RUNNING], 0), (metrics[QUEUED], 0)
    for metric, wanted in at_rest:
        wait_value(metric, llm, wanted)
    body = {"text_input": "a b !slow", "stream": True, "max_tokens": 500}
    url = f"{llm.http}/v2/models/llm/generate_stream"
    with ExitStack() as clients:
        for _ in range(COUNT):
            asked = httpx.stream("POST", url, json=body, timeout=WAIT_SECS)
            assert clients.enter_context(asked).status_code == 200
        wait_value(metrics[RUNNING], llm, 1)  # of the stand-in
        wait_value(metrics[QUEUED], llm, COUNT - 1)
    for metric, wanted in at_rest:
        wait_value(metric, llm, wanted)
