"""The check as a whole, on a machine without a GPU."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.gpu_check import parts
from loadtests.gpu_check.check import chosen, why_not
from loadtests.gpu_check.parts import CPU, CUDA, PARTS, Asked, Part

NO_GPU = "no GPU: none"
ANYWHERE = Part(name="p", module="m", asks="?", needs=("json",), limit_secs=1)
GPU_ONLY = Part(name="p", module="m", asks="?", needs=("json",), limit_secs=1, only_gpu=True)
LACKING = Part(name="p", module="m", asks="?", needs=("no_such_module",), limit_secs=1)


def asked(device: str) -> Asked:
    return Asked(device=device, streams=[1], max_tokens=1, secs=0.1)


@pytest.mark.parametrize(
    ("part", "device", "no_gpu", "left_secs", "reason"),
    [
        (ANYWHERE, CUDA, "", 100.0, ""),
        (ANYWHERE, CPU, NO_GPU, 100.0, ""),
        (ANYWHERE, CUDA, NO_GPU, 100.0, NO_GPU),
        (GPU_ONLY, CUDA, "", 100.0, ""),
        (GPU_ONLY, CPU, "", 100.0, "GPUs only"),
        (LACKING, CPU, "", 100.0, "not installed: no-such-module"),
        (ANYWHERE, CPU, "", 15.0, ""),
        (ANYWHERE, CPU, "", 14.9, "--limit-secs"),
    ],
)
def test_why_a_part_is_skipped(
    part: Part, device: str, no_gpu: str, left_secs: float, reason: str
) -> None:
    found = why_not(part, asked(device), no_gpu, left_secs)
    assert reason in found
    assert bool(found) == bool(reason)


def test_parts_are_chosen_by_name_and_keep_their_order() -> None:
    assert [part.name for part in chosen("generation,pytorch")] == ["pytorch", "generation"]
    assert chosen("") == list(PARTS)
    with pytest.raises(SystemExit, match="no part 'dance'"):
        chosen("dance")


def run(*arguments: str) -> tuple[int, dict[str, object], str]:
    """The status, what was saved, and what was shown."""
    ended = subprocess.run(
        [sys.executable, "-m", "loadtests", "gpu_check", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    saved = re.search(r"saved: (.*)", ended.stdout)
    assert saved, ended.stderr
    file = Path(saved[1])
    told = json.loads(file.read_text())
    file.unlink()
    return ended.returncode, {each["part"]: each for each in told["results"]}, ended.stdout


@pytest.mark.skipif(not parts.why_none(), reason="there is a GPU")
def test_without_a_gpu_every_part_is_skipped_and_that_is_no_failure() -> None:
    status, parts, shown = run()
    assert status == 0
    assert list(parts) == [part.name for part in PARTS]
    for each in parts.values():
        assert isinstance(each, dict)
        assert each["status"] == "skipped"
        assert each["reason"].startswith("no GPU: the CUDA driver")
    assert "skipped" in shown


def test_on_the_cpu_a_part_measures_the_real_thing() -> None:
    pytest.importorskip("onnxruntime")
    status, parts, shown = run("--device=cpu", "--parts=onnxruntime,gpu_metrics", "--secs=0.2")
    assert status == 0, shown
    found = parts["onnxruntime"]
    assert isinstance(found, dict)
    assert found["status"] == "passed"
    error, one, many = found["rows"]
    assert error["ok"]
    assert one["gateway"] > 0 < one["alone"]
    assert many["gateway"] > 0
    skipped = parts["gpu_metrics"]
    assert isinstance(skipped, dict)
    assert skipped["status"] == "skipped"
