"""Statistics as the v2 protocol shows them (statistics extension)."""

from collections.abc import Iterable
from typing import Any

from gateway.observability.statistics import Duration, ModelStatistics

NOTHING = Duration()


def statistics_row(name: str, version: str, statistics: ModelStatistics) -> dict[str, Any]:
    """One `model_stats` row (statistics extension), with the field names of the message.

    Triton's engines report how long inputs and outputs took; ours count all as `compute_infer`.
    """
    nothing = Duration(statistics.success.count, 0)
    return {
        "name": name,
        "version": version,
        "last_inference": statistics.last_inference_ms,
        "inference_count": statistics.inference_count,
        "execution_count": statistics.execution_count,
        "inference_stats": {
            "success": _duration(statistics.success),
            "fail": _duration(statistics.fail),
            "queue": _duration(statistics.queue),
            "compute_input": _duration(nothing),
            "compute_infer": _duration(statistics.compute_infer),
            "compute_output": _duration(nothing),
            "cache_hit": _duration(NOTHING),
            "cache_miss": _duration(NOTHING),
        },
        "response_stats": {},
        "batch_stats": list(_batches(statistics)),
        "memory_usage": [],
    }


def _batches(statistics: ModelStatistics) -> Iterable[dict[str, Any]]:
    for size, duration in sorted(statistics.batches.items()):
        nothing = Duration(duration.count, 0)
        yield {
            "batch_size": size,
            "compute_input": _duration(nothing),
            "compute_infer": _duration(duration),
            "compute_output": _duration(nothing),
        }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
