"""Metrics of this machine: its CPUs and memory from /proc, its GPUs from NVML."""

import time
from pathlib import Path

from prometheus_client.core import Metric

from gateway.observability.gpus import GPUS, Gpus
from gateway.settings import MetricsSettings

PROC = Path("/proc")
KIB = 1024
IDLE_FIELDS = slice(3, 5)
"""`idle` and `iowait` among the fields of the line `cpu` in /proc/stat."""
TIME_FIELDS = slice(0, 8)
"""All but `guest` and `guest_nice`, which are part of `user` and `nice`."""

PINNED = {
    "nv_pinned_memory_pool_total_bytes": "Pinned memory pool total memory size, in bytes",
    "nv_pinned_memory_pool_used_bytes": "Pinned memory pool used memory size, in bytes",
}
CPU = {
    "nv_cpu_utilization": "CPU utilization rate [0.0 - 1.0]",
    "nv_cpu_memory_total_bytes": "CPU total memory (RAM), in bytes",
    "nv_cpu_memory_used_bytes": "CPU used memory (RAM), in bytes",
}
MACHINE = PINNED | GPUS | CPU


class Machine:
    """Reads the machine when it is asked; what it cannot read has no series.

    There is no pool of pinned memory: its two gauges are there, as on Triton, and say 0.
    """

    def __init__(self, settings: MetricsSettings, proc: Path = PROC) -> None:
        told = settings.cpu and (proc / "stat").exists()
        self._cpu = CpuTimes(proc, settings.interval_ms / 1000) if told else None
        self._proc = proc
        self.gpus = Gpus.found() if settings.gpu else None

    def families(self, now: float | None = None) -> list[Metric]:
        """The gauges of CPUs and memory; `now` is in seconds of the monotonic clock."""
        values = dict.fromkeys(PINNED, 0.0)
        if self._cpu is not None:
            moment = time.monotonic() if now is None else now
            values |= {"nv_cpu_utilization": self._cpu.utilization(moment)} | memory(self._proc)
        return [_gauge(name, value) for name, value in values.items()]


class CpuTimes:
    """How busy the CPUs were since they were last asked, over no less than the interval."""

    def __init__(self, proc: Path, interval_secs: float) -> None:
        self._proc = proc
        self._interval_secs = interval_secs
        self._before = self._read()
        self._read_at = float("-inf")
        self._utilization = 0.0

    def utilization(self, now: float) -> float:
        """Between 0 and 1, of all CPUs together."""
        if now - self._read_at < self._interval_secs:
            return self._utilization
        idle, total = self._read()
        idle_before, total_before = self._before
        if total > total_before:
            self._utilization = 1 - (idle - idle_before) / (total - total_before)
            self._before, self._read_at = (idle, total), now
        return self._utilization

    def _read(self) -> tuple[int, int]:
        line = (self._proc / "stat").read_text().partition("\n")[0]
        fields = [int(each) for each in line.split()[1:]][TIME_FIELDS]
        return sum(fields[IDLE_FIELDS]), sum(fields)


def memory(proc: Path) -> dict[str, float]:
    """Total and used memory in bytes."""
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    kib = {name.removesuffix(":"): int(amount) for name, amount, *_ in lines}
    total, available = kib["MemTotal"], kib["MemAvailable"]
    return {
        "nv_cpu_memory_total_bytes": total * KIB,
        "nv_cpu_memory_used_bytes": (total - available) * KIB,
    }


def _gauge(name: str, value: float) -> Metric:
    family = Metric(name, MACHINE[name], "gauge")
    family.add_sample(name, {}, value)
    return family
