"""Metrics of the GPUs, where there are some and NVML can be asked."""

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from prometheus_client.core import Metric

log = logging.getLogger("sluice.metrics")

PERCENT = 100
MILLI = 1000

GPUS = {
    "nv_gpu_utilization": "GPU utilization rate [0.0 - 1.0)",
    "nv_gpu_memory_total_bytes": "GPU total memory, in bytes",
    "nv_gpu_memory_used_bytes": "GPU used memory, in bytes",
    "nv_gpu_power_usage": "GPU power usage in watts",
    "nv_gpu_power_limit": "GPU power management limit in watts",
    "nv_energy_consumption": "GPU energy consumption in joules since the server started",
}
COUNTER = "nv_energy_consumption"


class Gpus:
    """The GPUs of this machine, through an initialised NVML; labelled by their UUIDs."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._handles = {_text(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
        self._joules_before = {
            uuid: joules
            for uuid, gpu in self._handles.items()
            for joules in self._told(partial(self._joules, gpu))
        }

    @classmethod
    def found(cls) -> "Gpus | None":
        """Those of this machine, or None where Python's `pynvml` or a GPU is missing."""
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

    def families(self) -> list[Metric]:
        """Blocks for some milliseconds; what a GPU does not tell has no series."""
        found = {n: Metric(n, text, _kind(n)) for n, text in GPUS.items()}
        for uuid, gpu in self._handles.items():
            for name, read in self._readers(uuid, gpu):
                for value in self._told(read):
                    found[name].add_sample(name, {"gpu_uuid": uuid}, value)
        return list(found.values())

    def _readers(self, uuid: str, gpu: Any) -> Iterator[tuple[str, Callable[[], float]]]:
        nvml = self._nvml
        yield "nv_gpu_utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / PERCENT
        yield "nv_gpu_memory_total_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).total
        yield "nv_gpu_memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used
        yield "nv_gpu_power_usage", lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / MILLI
        yield "nv_gpu_power_limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / MILLI
        yield COUNTER, lambda: self._joules(gpu) - self._joules_before[uuid]

    def _joules(self, gpu: Any) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)) / MILLI

    def _told(self, read: Callable[[], float]) -> Sequence[float]:
        try:
            return (read(),)
        except self._nvml.NVMLError:
            return ()


def _kind(name: str) -> str:
    return "counter" if name == COUNTER else "gauge"


def _text(found: str | bytes) -> str:
    return found.decode() if isinstance(found, bytes) else found
