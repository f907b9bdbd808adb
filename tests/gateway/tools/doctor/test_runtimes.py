"""GPUs: the driver, its cards, Torch and ONNX Runtime."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.tools.doctor.probes import Outcome
from gateway.tools.doctor.report import Health
from gateway.tools.doctor.runtimes import driver, gpus, onnxruntime, torch

GIB = 1 << 30
CARD = {"name": "NVIDIA H200", "total": 140 * GIB, "used": 2 * GIB, "capability": [9, 0]}
NVML = {"driver": "580.159.03", "cuda": 13000, "gpus": [CARD]}
KERNEL = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue Oct  7\nGCC version: 12\n"


@pytest.fixture
def no_driver(tmp_path: Path) -> Path:
    return tmp_path / "version"


@pytest.fixture
def kernel_driver(no_driver: Path) -> Path:
    no_driver.write_text(KERNEL)
    return no_driver


def test_the_driver_and_each_gpu_are_findings(kernel_driver: Path) -> None:
    first, card = driver(Outcome(NVML), kernel_driver)
    assert first.found == "580.159.03, up to CUDA 13.0"
    assert card.what == "GPU 0"
    assert card.found == "NVIDIA H200, compute capability 9.0, 138.0 GiB of 140.0 GiB free"
    assert first.verdict is card.verdict is Health.OK


def test_a_gpu_without_free_memory_is_a_warning(kernel_driver: Path) -> None:
    full = {**CARD, "used": 139 * GIB}
    _, card = driver(Outcome({**NVML, "gpus": [full]}), kernel_driver)
    assert card.verdict is Health.WARNING


def test_without_pynvml_the_driver_itself_is_known(kernel_driver: Path) -> None:
    (found,) = driver(Outcome({"missing": True}), kernel_driver)
    assert found.verdict is Health.WARNING
    assert found.found.startswith("580.159.03")
    assert found.fix == "pip install nvidia-ml-py"


@pytest.mark.parametrize("told", [{"missing": True}, {"error": "NVML Shared Library Not Found"}])
def test_without_a_driver_gpus_cannot_be_used(told: Mapping[str, Any], no_driver: Path) -> None:
    (found,) = driver(Outcome(told), no_driver)
    assert found.verdict is Health.CANNOT


def test_a_driver_that_does_not_answer_is_broken(kernel_driver: Path) -> None:
    hung = Outcome(failure="does not end within 60 s")
    (found,) = driver(hung, kernel_driver)
    assert found.verdict is Health.BROKEN
    assert "does not end" in found.found


def sees(cuda: str | None, *capabilities: Sequence[int], first: str = "sm_75") -> Outcome:
    architectures = [first, "sm_90a", "compute_120"]
    return Outcome(
        {"cuda": cuda, "capabilities": capabilities, "architectures": architectures},
    )


@pytest.mark.parametrize(
    ("outcome", "cards", "verdict"),
    [
        (sees("13.0", [9, 0]), [CARD], Health.OK),
        (sees("13.0"), [CARD], Health.BROKEN),
        (sees("13.0"), [], Health.WARNING),
        (sees(None), [CARD], Health.CANNOT),
        (sees(None), [], Health.OK),
        (sees("13.0", [7, 0]), [CARD], Health.CANNOT),
        (sees("13.0", [12, 0], first="sm_100"), [CARD], Health.OK),
        (Outcome(failure="crashes with SIGSEGV: it says nothing"), [CARD], Health.BROKEN),
    ],
)
def test_torch(outcome: Outcome, cards: Sequence[Mapping[str, Any]], verdict: Health) -> None:
    assert torch(outcome, cards).verdict is verdict


@pytest.mark.parametrize(
    ("provider", "cards", "verdict"),
    [
        ("CUDAExecutionProvider", [CARD], Health.OK),
        ("CUDAExecutionProvider", [], Health.WARNING),
        ("AzureExecutionProvider", [CARD], Health.CANNOT),
        ("AzureExecutionProvider", [], Health.OK),
    ],
)
def test_onnxruntime(provider: str, cards: Sequence[Mapping[str, Any]], verdict: Health) -> None:
    told = Outcome({"providers": [provider, "CPUExecutionProvider"]})
    assert onnxruntime(told, cards).verdict is verdict


def test_a_failed_probe_has_no_gpu() -> None:
    assert list(gpus(Outcome(failure="fails"))) == []
