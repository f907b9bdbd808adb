"""The part about TensorRT, on the stand-ins for it and for CUDA."""

import json
import os
import subprocess
from pathlib import Path

from loadtests.gpu_check.outcome import COMMAND
from loadtests.gpu_check.parts import CUDA, Asked
from tests import needs

STAND_IN = Path(__file__).parents[2] / "backends" / "tensorrt" / "stand_in"
ASKED = Asked(device=CUDA, streams=[1], max_tokens=1, secs=0.2)


def test_a_plan_is_built_served_and_held_against_the_cpu(tmp_path: Path) -> None:
    compiler = needs.c_compiler()
    driver = tmp_path / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-o", driver, STAND_IN / "driver.c"]
    subprocess.run(command, check=True, timeout=30)
    answer = tmp_path / "answer"
    asked = json.dumps(ASKED.as_json())
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
