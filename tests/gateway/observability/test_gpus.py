"""GPUs, as NVML tells of them."""

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from gateway.observability.exposition import render
from gateway.observability.gpus import GPUS, Gpus


class NVMLError(Exception):
    """What NVML raises for whatever it cannot do."""


@dataclass
class Nvml:
    """Two GPUs, the second of which does not know its energy."""

    millijoules: list[float] = field(default_factory=lambda: [5_000.0])
    NVMLError: type[Exception] = NVMLError

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, gpu: int) -> str | bytes:
        return "GPU-a" if gpu == 0 else b"GPU-b"

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=37)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(total=1000, used=10 + gpu)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return 71_500

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: int) -> int:
        return 700_000

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> float:
        if gpu == 1:
            raise NVMLError("Not Supported")
        return self.millijoules[-1]


def test_each_gpu_has_its_series_by_its_uuid() -> None:
    nvml = Nvml()
    gpus = Gpus(nvml)
    nvml.millijoules.append(7_500.0)
    found = render(gpus.families()).decode().splitlines()
    for line in (
        'nv_gpu_utilization{gpu_uuid="GPU-a"} 0.37',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-b"} 1000',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-b"} 11',
        'nv_gpu_power_usage{gpu_uuid="GPU-a"} 71.5',
        'nv_gpu_power_limit{gpu_uuid="GPU-b"} 700',
        'nv_energy_consumption{gpu_uuid="GPU-a"} 2.5',
        "# TYPE nv_energy_consumption counter",
        "# TYPE nv_gpu_utilization gauge",
    ):
        assert line in found
    assert {line.split()[2] for line in found if line.startswith("# TYPE")} == set(GPUS)


def test_what_a_gpu_does_not_tell_has_no_series() -> None:
    assert 'nv_energy_consumption{gpu_uuid="GPU-b"}' not in render(Gpus(Nvml()).families()).decode()


def test_without_nvml_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus.found() is None


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NVMLError("NVML Shared Library Not Found")

    broken = SimpleNamespace(nvmlInit=fail, NVMLError=NVMLError)
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert Gpus.found() is None
