"""Metrics of CPUs and memory from /proc, and of GPUs from NVML."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.observability.exposition import render
from gateway.observability.machine import CPU, GPUS, PINNED, CpuTimes, GpuMetrics, Machine, memory
from gateway.settings import MetricsSettings

MEMINFO = (
    "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\nHugePages: 0\n"
)


def write_stat(proc: Path, *fields: int) -> None:
    (proc / "stat").write_text(f"cpu  {' '.join(map(str, fields))}\ncpu0 1 2 3\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write_stat(tmp_path, 100, 0, 0, 100, 0, 0, 0, 0, 0, 0)
    (tmp_path / "meminfo").write_text(MEMINFO)
    return tmp_path


def test_utilization_is_the_busy_time_since_the_last_reading(proc: Path) -> None:
    times = CpuTimes(proc, 2.0)
    write_stat(proc, 120, 5, 5, 150, 20, 0, 0, 0, 0, 0)
    assert times.utilization(10.0) == pytest.approx(0.3)
    write_stat(proc, 220, 5, 5, 150, 20, 0, 0, 0, 0, 0)
    assert times.utilization(11.9) == pytest.approx(0.3), "the interval is not over"
    assert times.utilization(12.0) == 1.0


def test_the_time_of_guests_is_not_counted_twice(proc: Path) -> None:
    times = CpuTimes(proc, 2.0)
    write_stat(proc, 150, 0, 0, 150, 0, 0, 0, 0, 50, 0)
    assert times.utilization(10.0) == pytest.approx(0.5)


def test_memory_is_used_if_it_is_not_available(proc: Path) -> None:
    assert memory(proc) == {
        "nv_cpu_memory_total_bytes": 1_024_000,
        "nv_cpu_memory_used_bytes": 614_400,
    }


def values(machine: Machine) -> dict[str, float]:
    return {family.name: family.samples[0].value for family in machine.families(now=1.0)}


def test_every_gauge_has_one_value(proc: Path) -> None:
    found = values(Machine(MetricsSettings(gpu=False), proc))
    assert found.keys() == {*PINNED, *CPU}
    assert [found[name] for name in PINNED] == [0.0, 0.0]


def test_without_cpu_metrics_only_the_pool_is_shown(proc: Path) -> None:
    assert values(Machine(MetricsSettings(cpu=False, gpu=False), proc)).keys() == {*PINNED}


def test_where_there_is_no_proc_nothing_is_made_up(tmp_path: Path) -> None:
    machine = Machine(MetricsSettings(gpu=False), tmp_path / "none")
    found = values(machine)
    assert found.keys() == {*PINNED}


def test_this_machine_has_memory_and_cpus() -> None:
    found = values(Machine(MetricsSettings(gpu=False)))
    assert 0 <= found["nv_cpu_utilization"] <= 1
    assert 0 < found["nv_cpu_memory_used_bytes"] < found["nv_cpu_memory_total_bytes"]


class NVMLError(Exception):
    """The error that NVML raises."""


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
    gpus = GpuMetrics(nvml)
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


def test_a_value_that_a_gpu_lacks_has_no_series() -> None:
    found = render(GpuMetrics(Nvml()).families()).decode()
    assert 'nv_energy_consumption{gpu_uuid="GPU-b"}' not in found


def test_without_nvml_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMetrics.found() is None


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NVMLError("NVML Shared Library Not Found")

    broken = SimpleNamespace(nvmlInit=fail, NVMLError=NVMLError)
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert GpuMetrics.found() is None
