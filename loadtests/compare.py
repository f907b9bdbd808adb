"""The gateway and vLLM's own server, on the same model with the same engine arguments.

They are started in turn, get the same prompts from the same client, and are stopped again.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from rich.console import Console

from loadtests import contenders, cpus, doors, rounds
from loadtests.cpus import pinned
from loadtests.doors import Door
from loadtests.engine import read_model
from loadtests.generation_load import Load, Outcome, put
from loadtests.prompts import prompts
from loadtests.results import Better, Metric, Results, comparison, save
from loadtests.rounds import LoadTestFailed, Plan, Step
from loadtests.server import Server
from loadtests.sse import Address

REPOSITORY = Path(__file__).parent.parent / "model_repository"
MODEL = "llama"
PROMPT_WORDS = 32
WARM_UP_TOKENS = 16
WARM_UP_SEED = 0
FEWEST_REQUESTS = 16
PROMPT_TOKENS = "prompt tokens"


def main() -> None:
    """Compare, print and save."""
    asked = _parser().parse_args()
    console = Console()
    with (
        rounds.failures_as_lines("compare"),
        pinned(asked.client_cpus),
        tempfile.TemporaryDirectory() as folder,
    ):
        model = asked.model_repository.resolve() / asked.model
        # Of a repository with many models only this one is to be loaded.
        (Path(folder) / asked.model).symlink_to(model)
        engine = read_model(model)
        plan = Plan(
            (contenders.vllm(asked.model, engine.flags), contenders.gateway(Path(folder))),
            {"vllm": _steps(asked, doors.vllm(asked.model))}
            | {contenders.GATEWAY: _steps(asked, doors.gateway(asked.model))},
            asked.rounds,
            asked.server_cpus,
        )
        results = rounds.run(plan, console)
        console.print(comparison(f"Generation, {asked.model}", results, ("vllm", "gateway")))
        rounds.tell_file(save("compare", vars(asked), results.as_rows()), console)
        _check_prompts(results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.compare", description=__doc__)
    parser.add_argument("--model-repository", type=Path, default=REPOSITORY, metavar="DIR")
    parser.add_argument("--model", default=MODEL, metavar="NAME", help="a model of backend vllm")
    parser.add_argument("--streams", type=rounds.positive_list, default=[1, 8, 32], metavar="N,N")
    parser.add_argument(
        "--max-tokens",
        type=rounds.positive,
        default=64,
        metavar="N",
        help="tokens of each answer (default: %(default)s)",
    )
    parser.add_argument(
        "--requests",
        type=rounds.positive,
        default=4,
        metavar="N",
        help="requests of each stream, one after the other (default: %(default)s, and at least "
        f"{FEWEST_REQUESTS} of all streams together)",
    )
    rounds.add_flags(parser)
    cpus.add_flags(parser)
    return parser


def _steps(asked: argparse.Namespace, door: Door) -> Sequence[Step]:
    warm_up = Load(max(asked.streams), 1, WARM_UP_TOKENS)
    measured = (
        Load(streams, max(asked.requests, -(-FEWEST_REQUESTS // streams)), asked.max_tokens)
        for streams in asked.streams
    )
    return [
        ("warm-up", partial(_warm_up, door, warm_up)),
        *(
            (f"{load.streams} streams", partial(_measure, door, load, seed))
            for seed, load in enumerate(measured, WARM_UP_SEED + 1)
        ),
    ]


def _warm_up(door: Door, load: Load, server: Server) -> Mapping[Metric, float]:
    _put(door, load, WARM_UP_SEED, server)
    return {}


def _measure(door: Door, load: Load, seed: int, server: Server) -> Mapping[Metric, float]:
    """Put a load on a server; what its client saw, if the server counted the same tokens."""
    counters = door.counters(server)
    before = counters.read()
    outcome = _put(door, load, seed, server)
    counted = counters.read_after(before, load.tokens)
    if counted.completion != load.tokens:
        raise LoadTestFailed(
            f"{server.name} counted {counted.completion} tokens, expected {load.tokens}"
        )
    return {**_figures(outcome, load), Metric(PROMPT_TOKENS, load.streams, ""): counted.prompt}


def _put(door: Door, load: Load, seed: int, server: Server) -> Outcome:
    # Every load has prompts of its own, and both servers get the same.
    return put(load, Address(server.ports.http), door.encode, prompts(PROMPT_WORDS, seed))


def _figures(outcome: Outcome, load: Load) -> Mapping[Metric, float]:
    timings, streams = outcome.timings, load.streams
    gaps = list(chain.from_iterable(timing.gaps for timing in timings))
    firsts = [timing.first for timing in timings]
    events = sum(len(timing.arrivals) for timing in timings)
    return {
        Metric("tokens/s", streams, "", Better.HIGHER): load.tokens / outcome.secs,
        Metric("TTFT p50", streams, "ms", Better.LOWER): statistics.median(firsts) * 1e3,
        Metric("inter-token p99", streams, "ms", Better.LOWER): _p99(gaps) * 1e3,
        Metric("tokens per event", streams, ""): load.tokens / events,
        Metric("CPU of the client", streams, "cores"): outcome.client_cores,
    }


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[-1]


def _check_prompts(results: Results) -> None:
    for metric, found in results.values.items():
        if metric.name == PROMPT_TOKENS and len(set(chain(*found.values()))) > 1:
            raise LoadTestFailed(f"the servers read prompts of different lengths: {found}")


if __name__ == "__main__":
    main()
