"""Metrics of this machine: CPUs and memory from /proc, GPUs from NVML, and of the event loop."""

import importlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gateway.backend import MetricReading
from gateway.event_loop import LoopReading
from gateway.settings import MetricsSettings

log = logging.getLogger("sluice.metrics")

PROC = Path("/proc")
KIB = 1024
PERCENT = 100
MILLI = 1000
IDLE_FIELDS = slice(3, 5)
"""`idle` and `iowait` among the fields of the line `cpu` in /proc/stat."""
TIME_FIELDS = slice(0, 8)
"""All but `guest` and `guest_nice`, which are part of `user` and `nice`."""

PINNED = {
    "nv_pinned_memory_pool_total_bytes": "Pinned memory pool total memory size, in bytes",
    "nv_pinned_memory_pool_used_bytes": "Pinned memory pool used memory size, in bytes",
}
ENERGY = "nv_energy_consumption"
GPUS = {
    "nv_gpu_utilization": "GPU utilization rate [0.0 - 1.0)",
    "nv_gpu_memory_total_bytes": "GPU total memory, in bytes",
    "nv_gpu_memory_used_bytes": "GPU used memory, in bytes",
    "nv_gpu_power_usage": "GPU power usage in watts",
    "nv_gpu_power_limit": "GPU power management limit in watts",
    ENERGY: "GPU energy consumption in joules since the server started",
}
CPU = {
    "nv_cpu_utilization": "CPU utilization rate [0.0 - 1.0]",
    "nv_cpu_memory_total_bytes": "CPU total memory (RAM), in bytes",
    "nv_cpu_memory_used_bytes": "CPU used memory (RAM), in bytes",
}
MACHINE = PINNED | GPUS | CPU
LOOP_METRICS = {
    "gateway_event_loop_blocks_total": "Timers of the event loop that ran at least 0.1 s late",
    "gateway_event_loop_blocked_seconds_total": "Delays of these timers",
    "gateway_event_loop_longest_delay_seconds": "The longest delay of the event loop so far",
}


class Machine:
    """The metrics of one machine, read at each call; a value that cannot be read has no series.

    The two gauges of a pool of pinned memory are 0: the server has no such pool.
    """

    def __init__(self, settings: MetricsSettings, proc: Path = PROC) -> None:
        with_cpu = settings.cpu and (proc / "stat").exists()
        self._cpu = CpuTimes(proc, settings.interval_ms / 1000) if with_cpu else None
        self._proc = proc
        self.gpus = GpuMetrics.found() if settings.gpu else None

    def families(self, now: float | None = None) -> list[MetricReading]:
        """The gauges of CPUs and memory; `now` is in seconds of the monotonic clock."""
        values = dict.fromkeys(PINNED, 0.0)
        if self._cpu is not None:
            moment = time.monotonic() if now is None else now
            values |= {"nv_cpu_utilization": self._cpu.utilization(moment)} | memory(self._proc)
        return [_gauge(name, value) for name, value in values.items()]


def loop_families(readings: Mapping[str, LoopReading]) -> list[MetricReading]:
    """The blocks of event loops since the start, by kind of process; "" is the server's own."""
    found = []
    for place, (name, text) in enumerate(LOOP_METRICS.items()):
        family = MetricReading(name, text, "counter" if name.endswith("_total") else "gauge")
        for process, reading in readings.items():
            family.add_sample(name, {"process": process} if process else {}, reading[place])
        found.append(family)
    return found


class CpuTimes:
    """CPU utilization since the last reading; readings are at least the interval apart."""

    def __init__(self, proc: Path, interval_secs: float) -> None:
        self._proc = proc
        self._interval_secs = interval_secs
        self._before = self._read()
        self._read_at = float("-inf")
        self._utilization = 0.0

    def utilization(self, now: float) -> float:
        """Between 0 and 1, over all CPUs; `now` is in seconds of the monotonic clock."""
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


class GpuMetrics:
    """The GPUs of this machine, read through an initialised NVML and labelled by UUID."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._handles = {_text(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
        self._joules_before = {
            uuid: joules
            for uuid, gpu in self._handles.items()
            for joules in self._value(partial(self._joules, gpu))
        }

    @classmethod
    def found(cls) -> "GpuMetrics | None":
        """The GPUs of this machine; None without Python's `pynvml`, a driver or a GPU."""
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
            return cls(nvml)
        except nvml.NVMLError as error:
            log.debug("no metrics of GPUs", extra={"reason": str(error)})
            return None

    def families(self) -> list[MetricReading]:
        """The metrics of all GPUs; blocks for some milliseconds.

        A value that NVML does not support for a GPU has no series.
        """
        found = {n: MetricReading(n, text, _gpu_type(n)) for n, text in GPUS.items()}
        for uuid, gpu in self._handles.items():
            for name, read in self._readers(uuid, gpu):
                for value in self._value(read):
                    found[name].add_sample(name, {"gpu_uuid": uuid}, value)
        return list(found.values())

    def _readers(self, uuid: str, gpu: Any) -> Iterator[tuple[str, Callable[[], float]]]:
        nvml = self._nvml
        yield "nv_gpu_utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / PERCENT
        yield "nv_gpu_memory_total_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).total
        yield "nv_gpu_memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used
        yield "nv_gpu_power_usage", lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / MILLI
        yield "nv_gpu_power_limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / MILLI
        yield ENERGY, lambda: self._joules(gpu) - self._joules_before[uuid]

    def _joules(self, gpu: Any) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)) / MILLI

    def _value(self, read: Callable[[], float]) -> Sequence[float]:
        """The value, or nothing if NVML fails to read it."""
        try:
            return (read(),)
        except self._nvml.NVMLError:
            return ()


def memory(proc: Path) -> dict[str, float]:
    """Total and used memory in bytes."""
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    kib = {name.removesuffix(":"): int(amount) for name, amount, *_ in lines}
    total, available = kib["MemTotal"], kib["MemAvailable"]
    return {
        "nv_cpu_memory_total_bytes": total * KIB,
        "nv_cpu_memory_used_bytes": (total - available) * KIB,
    }


def _gauge(name: str, value: float) -> MetricReading:
    family = MetricReading(name, MACHINE[name], "gauge")
    family.add_sample(name, {}, value)
    return family


def _gpu_type(name: str) -> str:
    return "counter" if name == ENERGY else "gauge"


def _text(found: str | bytes) -> str:
    return found.decode() if isinstance(found, bytes) else found
