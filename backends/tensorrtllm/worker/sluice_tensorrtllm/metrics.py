"""Triton's metrics of TensorRT-LLM."""

import asyncio
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import triton_python_backend_utils as pb_utils
from sluice_llm.metrics import MetricFamilies

WAIT_SECS = 2
KV, BATCH = "kvCacheStats", "inflightBatchingStats"
GAUGES: tuple[tuple[str, str, Mapping[str, tuple[str, str]]], ...] = (
    (
        "nv_trt_llm_request_metrics",
        "request_type",
        {
            "active": ("", "numActiveRequests"),
            "max": ("", "maxNumActiveRequests"),
            "waiting": ("", "numQueuedRequests"),
            "scheduled": (BATCH, "numScheduledRequests"),
            "context": (BATCH, "numContextRequests"),
        },
    ),
    (
        "nv_trt_llm_runtime_memory_metrics",
        "memory_type",
        {
            "cpu": ("", "cpuMemUsage"),
            "gpu": ("", "gpuMemUsage"),
            "pinned": ("", "pinnedMemUsage"),
        },
    ),
    (
        "nv_trt_llm_kv_cache_block_metrics",
        "kv_cache_block_type",
        {
            "max": (KV, "maxNumBlocks"),
            "free": (KV, "freeNumBlocks"),
            "used": (KV, "usedNumBlocks"),
            "tokens_per": (KV, "tokensPerBlock"),
            "reused": (KV, "reusedBlocks"),
        },
    ),
    (
        "nv_trt_llm_inflight_batcher_metrics",
        "inflight_batcher_specific_metric",
        {
            "total_context_tokens": (BATCH, "numCtxTokens"),
            "generation_requests": (BATCH, "numGenRequests"),
            "micro_batch_id": (BATCH, "microBatchId"),
            "paused_requests": (BATCH, "numPausedRequests"),
        },
    ),
    (
        "nv_trt_llm_general_metrics",
        "general_type",
        {"iteration_counter": ("", "iter"), "timestamp": ("", "timestamp")},
    ),
)
"""Family, its label, and for each value of that the part and the field of an iteration's record."""


class TrtLlmMetrics:
    """The gauges of one model, held by this object."""

    def __init__(self, metrics: MetricFamilies) -> None:
        self._metrics = metrics
        self._gauges: dict[tuple[str, str], Any] = {}
        for name, label, values in GAUGES:
            self._add_gauges(name, label, values)

    async def follow(self, llm: Any) -> None:
        """Set the gauges from the engine's records, for ever."""
        while True:
            began = time.monotonic()
            async for record in llm.get_stats_async(timeout=WAIT_SECS):
                self.show(record)
            await _rest(began)

    def show(self, record: Mapping[str, Any]) -> None:
        """Set the gauges from one record; missing values stay unchanged."""
        for name, _, values in GAUGES:
            for value, (part, field) in values.items():
                found = (record.get(part) or {}) if part else record
                if (number := _number(found.get(field))) is not None:
                    self._gauges[name, value].set(number)
        if most := (record.get(KV) or {}).get("maxNumBlocks"):
            used = (record.get(KV) or {}).get("usedNumBlocks", 0)
            self._gauges["nv_trt_llm_kv_cache_block_metrics", "fraction"].set(used / most)

    def _add_gauges(self, name: str, label: str, values: Mapping[str, Any]) -> None:
        kind = pb_utils.MetricFamily.GAUGE
        family = self._metrics.family(name, f"TensorRT-LLM, by {label}", kind)
        derived = ["fraction"] if "tokens_per" in values else []
        for value in [*values, *derived]:
            self._gauges[name, value] = self._metrics.gauge(family, label, value)


async def _rest(began: float) -> None:
    """Wait before the next query, if the library has returned at once."""
    await asyncio.sleep(max(0.0, WAIT_SECS - (time.monotonic() - began)))


def _number(found: Any) -> float | None:
    """The number in a field of a record; times are texts there."""
    if isinstance(found, int | float):
        return float(found)
    if not isinstance(found, str):
        return None
    try:
        return datetime.strptime(found, "%m-%d-%Y %H:%M:%S.%f").timestamp()
    except ValueError:
        return None
