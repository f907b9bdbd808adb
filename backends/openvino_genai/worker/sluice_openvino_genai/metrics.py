"""Gauges of the engine."""

from typing import Any

import triton_python_backend_utils as pb_utils
from sluice_llm.metrics import MetricFamilies

REQUESTS = "nv_openvino_genai_request_metrics"
CACHE = "nv_openvino_genai_kv_cache_metrics"
ENGINE = {
    "vllm:num_requests_running": "Requests that the engine computes",
    "vllm:num_requests_waiting": "Requests that wait in the engine",
    "vllm:kv_cache_usage_perc": "Used share of the cache, from 0 to 1",
}
"""Gauges of engines with their own batching, under the names that the playground reads."""


class EngineGauges:
    """The gauges of one model, held by this object; equal values are not sent again."""

    def __init__(self, metrics: MetricFamilies, blocks: int, most: int) -> None:
        self._metrics = metrics
        self._blocks = blocks
        self._gauges: dict[str, Any] = {}
        self._shown: dict[str, float] = {}
        requests = self._family(REQUESTS, "Requests in the engine, by request_type")
        cache = self._family(CACHE, "Blocks of the cache, by kv_cache_block_type")
        for value in ("active", "scheduled", "max"):
            self._gauges[value] = metrics.gauge(requests, "request_type", value)
        for value in ("used_blocks", "max_blocks", "fraction"):
            self._gauges[value] = metrics.gauge(cache, "kv_cache_block_type", value)
        for name, about in ENGINE.items():
            self._gauges[name] = self._family(name, about).Metric(labels=metrics.labels)
        self._set("max", most)
        self._set("max_blocks", blocks)

    def show(self, found: Any, sequences: int, running: int, waiting: int) -> None:
        """Set the gauges from the library's figures, which count each sequence as a request.

        `running` requests with `sequences` open ones are in the engine, `waiting` ones before it.
        """
        scheduled = min(running, found.scheduled_requests)
        idle = max(0, sequences - found.scheduled_requests)
        share = found.cache_usage / 100 if running else 0.0
        self._set("active", running + waiting)
        self._set("scheduled", scheduled)
        self._set("used_blocks", round(share * self._blocks))
        self._set("fraction", share)
        self._set("vllm:num_requests_running", scheduled)
        self._set("vllm:num_requests_waiting", waiting + min(idle, running - scheduled))
        self._set("vllm:kv_cache_usage_perc", share)

    def _family(self, name: str, about: str) -> Any:
        return self._metrics.family(name, f"OpenVINO GenAI: {about}", pb_utils.MetricFamily.GAUGE)

    def _set(self, name: str, value: float) -> None:
        if self._shown.get(name) != value:
            self._shown[name] = value
            self._gauges[name].set(value)
