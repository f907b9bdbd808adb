"""CPUs and memory, as /proc tells of them."""

from pathlib import Path

import pytest

from gateway.observability.machine import CPU, PINNED, CpuTimes, Machine, memory
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


def test_utilization_is_what_was_not_idle_since_the_last_time(proc: Path) -> None:
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


def test_without_cpu_metrics_only_the_pool_is_told(proc: Path) -> None:
    assert values(Machine(MetricsSettings(cpu=False, gpu=False), proc)).keys() == {*PINNED}


def test_where_there_is_no_proc_nothing_is_made_up(tmp_path: Path) -> None:
    machine = Machine(MetricsSettings(gpu=False), tmp_path / "none")
    found = values(machine)
    assert found.keys() == {*PINNED}


def test_this_machine_has_memory_and_cpus() -> None:
    found = values(Machine(MetricsSettings(gpu=False)))
    assert 0 <= found["nv_cpu_utilization"] <= 1
    assert 0 < found["nv_cpu_memory_used_bytes"] < found["nv_cpu_memory_total_bytes"]
