"""Tokens per second of vLLM: by the gateway over SSE, and by the engine called directly."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from loadtests import contenders, doors
from loadtests.cpus import Cpus
from loadtests.generation_figures import PROMPT_TOKENS, WARM_UP_SEED, figures, measure, warm_up
from loadtests.generation_load import Load
from loadtests.gpu_check import llama
from loadtests.gpu_check.asked import Asked
from loadtests.gpu_check.engine_alone import put_all
from loadtests.gpu_check.outcome import Row
from loadtests.results import Better, Metric, Results
from loadtests.server import serving

ALONE = "alone"
FEWEST_REQUESTS = 16
WARM_UP_TOKENS = 16


def check(asked: Asked) -> Sequence[Row]:
    """The same prompts to both; the one is stopped before the other is started."""
    first = Load(max(asked.streams), 1, WARM_UP_TOKENS)
    loads = [
        Load(streams, max(2, -(-FEWEST_REQUESTS // streams)), asked.max_tokens)
        for streams in asked.streams
    ]
    results = Results()
    with tempfile.TemporaryDirectory() as folder:
        repository = llama.write_repository(Path(folder), asked)
        alone = put_all(llama.engine_arguments(repository, asked), first, loads)
        for load, outcome in zip(loads, alone, strict=True):
            results.add(ALONE, figures(outcome, load))
        _measure_gateway(repository, first, loads, results)
    return [_row(metric, results) for metric in results.values if metric.name != PROMPT_TOKENS]


def _measure_gateway(
    repository: Path, first: Load, loads: Sequence[Load], results: Results
) -> None:
    door = doors.generate(llama.NAME)
    with serving(contenders.gateway(repository).launch(), Cpus()) as server:
        warm_up(door, first, server)
        for seed, load in enumerate(loads, WARM_UP_SEED + 1):
            results.add(contenders.GATEWAY, measure(door, load, seed, server))


def _row(metric: Metric, results: Results) -> Row:
    return Row(
        name=str(metric),
        gateway=results.median(metric, contenders.GATEWAY),
        alone=results.median(metric, ALONE) if metric.better is not Better.NEITHER else None,
        better=metric.better,
    )
