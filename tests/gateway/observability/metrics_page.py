"""A metrics page, and its samples."""

from typing import Any

from prometheus_client.core import Metric

from gateway.observability.exposition import render
from gateway.observability.metrics import (
    ModelReading,
    families,
)
from gateway.observability.statistics import FailureReason, ModelStatistics
from gateway.settings import MetricsSettings


def reading(
    name: str = "m",
    version: str = "1",
    statistics: ModelStatistics | None = None,
    *,
    in_flight: int = 0,
    ready: bool = True,
    runtime: list[Metric] | None = None,
    **fields: Any,
) -> ModelReading:
    return ModelReading(
        name=name,
        version=version,
        statistics=statistics or ModelStatistics(),
        in_flight=in_flight,
        ready=ready,
        families=runtime or [],
        **fields,
    )


EVERYTHING = MetricsSettings(histogram_latencies=True, summary_latencies=True)


def page(*readings: ModelReading, settings: MetricsSettings = EVERYTHING) -> str:
    return render(families(readings, settings)).decode()


def lines(*readings: ModelReading, settings: MetricsSettings = EVERYTHING) -> list[str]:
    return page(*readings, settings=settings).splitlines()


def samples(*readings: ModelReading, settings: MetricsSettings = EVERYTHING) -> list[str]:
    return [line for line in lines(*readings, settings=settings) if not line.startswith("#")]


# Values.


def busy() -> ModelStatistics:
    statistics = ModelStatistics()
    statistics.success.add(5_400_999)
    statistics.queue.add(40_000)
    statistics.compute_input.add(60_000)
    statistics.compute_infer.add(5_000_000)
    statistics.compute_output.add(70_000)
    statistics.inference_count = 7
    statistics.execution_count = 3
    statistics.pending = 2
    statistics.failures[FailureReason.CANCELED] = 4
    statistics.prompt_tokens, statistics.completion_tokens = 11, 12
    statistics.waste(5)
    return statistics
