"""A server of plans, on stand-ins for CUDA's driver, its runtime and TensorRT."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests import needs
from tests.backends.tensorrt.conftest import NEGATE, STAND_IN, save
from tests.backends.tensorrt.stand_in.stand_in_plans import Plan
from tests.fork_server import fresh
from tests.serving import Serving, http_get, wait_until, write_model

ON_GPU = "instance_group { kind: KIND_GPU count: 2 }\n"
GRAPHS = """
platform: "tensorrt_plan"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
instance_group { kind: KIND_GPU profile: "1" }
optimization { cuda { graphs: true graph_spec { batch_size: 1 } } }
parameters { key: "restart_tries" value { string_value: "0" } }
"""
IDENTITY = """
backend: "identity"
input { name: "a" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "a" data_type: TYPE_FP32 dims: [ 1 ] }
"""
TWO_PROFILES = replace(NEGATE, profiles=(*NEGATE.profiles, {"x": ([1, 4], [1, 4], [4, 4])}))
MEMORY = 1 << 20
MODELS: dict[str, tuple[str, Plan]] = {
    "plain": ("", NEGATE),
    "graphs": (GRAPHS, TWO_PROFILES),
    "doomed": (GRAPHS, TWO_PROFILES),
    "old": ("", replace(NEGATE, version="9.0.1")),
    "large": ("", replace(NEGATE, weights=2 * MEMORY)),
    "on_cpu": ("instance_group { kind: KIND_CPU }\n", NEGATE),
    "nowhere": ("instance_group { kind: KIND_GPU gpus: [ 7 ] }\n", NEGATE),
}


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Once this file is there, the GPU has failed."""
    return tmp_path_factory.mktemp("gpu") / "lost"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, lost: Path) -> Iterator[Serving]:
    """With models that load, and some that cannot."""
    compiler = needs.c_compiler()
    driver = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", driver, STAND_IN / "driver.c"], check=True, timeout=30
    )
    repository = tmp_path_factory.mktemp("repository")
    for name, (config, plan) in MODELS.items():
        write_model(repository, name, config)
        save(plan, repository / name / "1")
    write_model(repository, "identity", IDENTITY)
    environment = {
        "PYTHONPATH": str(STAND_IN),
        "LD_LIBRARY_PATH": str(driver.parent),
        "SLUICE_STAND_IN_GPUS": json.dumps({"memory": MEMORY, "lost_if": str(lost)}),
    }
    flags = ("--exit-on-error=false", "--strict-readiness=false", "--allow-gpu-metrics=false")
    served = Serving(repository, flags, environment, start=fresh)
    try:
        yield served.wait_ready()
    finally:
        served.stop()


@pytest.fixture
def http(server: Serving) -> Iterator[Any]:
    """A client of the server."""
    with tritonclient.http.InferenceServerClient(server.http.removeprefix("http://")) as client:
        yield client


def x(rows: int) -> Any:
    made = tritonclient.http.InferInput("x", [rows, 4], "FP32")
    made.set_data_from_numpy(np.arange(rows * 4, dtype=np.float32).reshape(rows, 4))
    return made


def test_a_plan_without_a_config_is_served_over_http(http: Any) -> None:
    config = http.get_model_config("plain")
    assert (config["backend"], config["platform"]) == ("tensorrt", "tensorrt_plan")
    assert config["default_model_filename"] == "model.plan"
    assert config["max_batch_size"] == 8
    assert [each["kind"] for each in config["instance_group"]] == ["KIND_GPU"]
    assert config["instance_group"][0]["gpus"] == [0]
    found = http.infer("plain", [x(3)]).as_numpy("y")
    np.testing.assert_array_equal(found, -np.arange(12, dtype=np.float32).reshape(3, 4))


def test_graphs_and_a_profile_of_the_config_are_used_over_grpc(server: Serving) -> None:
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        for rows in (1, 4):
            sent = tritonclient.grpc.InferInput("x", [rows, 4], "FP32")
            sent.set_data_from_numpy(np.ones((rows, 4), np.float32))
            found = client.infer("graphs", [sent]).as_numpy("y")
            np.testing.assert_array_equal(found, -np.ones((rows, 4), np.float32))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("old", "expecting library version 10.14.1 got 9.0.1"),
        ("large", "Cuda Runtime (out of memory); unload other models"),
        ("on_cpu", "TensorRT backend supports only GPU device"),
        ("nowhere", "specifies invalid or unsupported gpu id 7"),
    ],
)
def test_a_failed_load_is_reported_and_other_models_are_served(
    http: Any, server: Serving, model: str, reason: str
) -> None:
    (row,) = [each for each in http.get_model_repository_index() if each["name"] == model]
    assert row["state"] == "UNAVAILABLE"
    assert reason in row["reason"]
    assert str(STAND_IN) not in row["reason"]
    assert http.is_model_ready("plain")


def test_shapes_outside_of_the_profile_are_a_clients_mistake(http: Any) -> None:
    sent = tritonclient.http.InferInput("x", [9, 4], "FP32")
    sent.set_data_from_numpy(np.ones((9, 4), np.float32))
    with pytest.raises(tritonclient.http.InferenceServerException) as caught:
        http.infer("plain", [sent])
    assert "inference request batch-size must be <= 8 for 'plain'" in caught.value.message()


def test_a_gpu_that_fails_takes_its_models_along_and_no_others(
    http: Any, server: Serving, lost: Path
) -> None:
    lost.touch()
    try:
        with pytest.raises(tritonclient.http.InferenceServerException) as caught:
            http.infer("doomed", [x(1)])
        assert caught.value.status() == "503"
        assert "GPU 0 (Stand-in, compute capability 9.0) of model 'doomed' is gone" in str(
            caught.value
        )
        wait_until(lambda: not http.is_model_ready("doomed"), "doomed is not ready")
        sent = tritonclient.http.InferInput("a", [1], "FP32")
        sent.set_data_from_numpy(np.ones(1, np.float32))
        assert http.infer("identity", [sent]).as_numpy("a").tolist() == [1]
        assert http_get(server.ports["http"], "/v2/health/live")[0] == 200
    finally:
        lost.unlink()
