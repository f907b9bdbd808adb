"""Networks by the backends against the expected outputs; TensorRT and CUDA by stand-ins."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from loadtests.gpu_check.check import COMMAND
from loadtests.gpu_check.parts import CUDA, Asked
from loadtests.gpu_check.tensors import Array, compare, weights, write_onnx
from loadtests.support.servers import LoadTestFailed
from tests import needs

STAND_IN = Path(__file__).parents[2] / "backends" / "tensorrt" / "stand_in"
ASKED = Asked(device="cpu", streams=[1], max_tokens=1, secs=0.05)


def echo(x: Array) -> Array:
    return x


def nothing(folder: Path) -> None:
    """A backend that needs no file."""


def test_a_backend_that_cannot_load_is_a_failure_with_its_reason() -> None:
    with pytest.raises(LoadTestFailed, match="backend onnxruntime"):
        compare("onnxruntime", nothing, echo, echo, ASKED)


def test_outputs_that_differ_are_noticed() -> None:
    pytest.importorskip("onnxruntime")
    first, second = weights()

    def right(x: Array) -> Array:
        return (x @ first).clip(0) @ second

    def differing(x: Array) -> Array:
        return right(x) * 1.01

    for network, ok in ((right, True), (differing, False)):
        found = compare("onnxruntime", write_onnx, network, network, ASKED)
        assert found[0].ok is ok


def test_a_plan_is_built_served_and_held_against_the_cpu(tmp_path: Path) -> None:
    compiler = needs.c_compiler()
    driver = tmp_path / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-o", driver, STAND_IN / "driver.c"]
    subprocess.run(command, check=True, timeout=30)
    answer = tmp_path / "answer"
    asked = json.dumps(replace(ASKED, device=CUDA, secs=0.2).as_json())
    ended = subprocess.run(
        [*COMMAND, "tensorrt", asked, answer],
        env={
            **os.environ,
            "PYTHONPATH": str(STAND_IN),
            "LD_LIBRARY_PATH": str(tmp_path),
            "SLUICE_STAND_IN_GPUS": json.dumps({"memory": 1 << 24, "lost_if": ""}),
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(answer.read_text())
    assert told["status"] == "passed", told
    error, one, many = told["rows"]
    assert error["ok"]
    assert one["gateway"] > 0 < one["alone"]
    assert many["gateway"] > 0
