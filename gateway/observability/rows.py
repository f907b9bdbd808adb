"""Statistics as the v2 protocol shows them (statistics extension)."""

from collections.abc import Iterator
from typing import Any

from gateway.observability.statistics import Duration, ModelStatistics

RESPONSE_DURATIONS = (
    "compute_infer",
    "compute_output",
    "success",
    "fail",
    "empty_response",
    "cancel",
)


def statistics_row(name: str, version: str, statistics: ModelStatistics) -> dict[str, Any]:
    """One `model_stats` row (statistics extension), with the field names of the message."""
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
            "compute_input": _duration(statistics.compute_input),
            "compute_infer": _duration(statistics.compute_infer),
            "compute_output": _duration(statistics.compute_output),
            "cache_hit": _duration(statistics.cache_hit),
            "cache_miss": _duration(statistics.cache_miss),
        },
        "response_stats": dict(_responses(statistics)),
        "batch_stats": list(_batches(statistics)),
        "memory_usage": [
            {"type": each.type, "id": each.id, "byte_size": each.byte_size}
            for each in statistics.memory
        ],
    }


def _responses(statistics: ModelStatistics) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, row in enumerate(statistics.responses or ()):
        yield str(index), {name: _duration(getattr(row, name)) for name in RESPONSE_DURATIONS}


def _batches(statistics: ModelStatistics) -> Iterator[dict[str, Any]]:
    for size, batch in sorted(statistics.batches.items()):
        yield {
            "batch_size": size,
            "compute_input": _duration(batch.compute_input),
            "compute_infer": _duration(batch.compute_infer),
            "compute_output": _duration(batch.compute_output),
        }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
