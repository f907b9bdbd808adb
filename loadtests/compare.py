"""The gateway and vLLM's own server, on the same model with the same engine arguments.

They are started in turn, get the same prompts from the same client, and are stopped again.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from rich.console import Console

from loadtests.support import generation, rounds, servers
from loadtests.support.generation import (
    PROMPT_TOKENS,
    WARM_UP_SEED,
    Door,
    Load,
    gateway_defaults,
    read_model,
)
from loadtests.support.rounds import LoadTestFailed, Plan, Results, Step, comparison, save
from loadtests.support.servers import pinned

REPOSITORY = Path(__file__).parent.parent / "model_repository"
MODEL = "llama"
WARM_UP_TOKENS = 16
FEWEST_REQUESTS = 16


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
        engine = read_model(model, gateway_defaults())
        plan = Plan(
            (servers.vllm(asked.model, engine.flags), servers.gateway(Path(folder))),
            {name: _steps(asked, door) for name, door in _doors(asked).items()},
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
    parser.add_argument(
        "--chat",
        action="store_true",
        help="ask both by /v1/chat/completions, not by generate_stream and /v1/completions",
    )
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
    servers.add_cpu_flags(parser)
    return parser


def _doors(asked: argparse.Namespace) -> Mapping[str, Door]:
    """How each server is asked."""
    if asked.chat:
        return {
            "vllm": generation.chat(asked.model, generation.VLLM_COUNTERS),
            servers.GATEWAY: generation.chat(asked.model, generation.GATEWAY_COUNTERS),
        }
    return {
        "vllm": generation.completions(asked.model),
        servers.GATEWAY: generation.generate(asked.model),
    }


def _steps(asked: argparse.Namespace, door: Door) -> Sequence[Step]:
    warm_up = Load(max(asked.streams), 1, WARM_UP_TOKENS)
    measured = (
        Load(streams, max(asked.requests, -(-FEWEST_REQUESTS // streams)), asked.max_tokens)
        for streams in asked.streams
    )
    return [
        ("warm-up", partial(generation.warm_up, door, warm_up)),
        *(
            (f"{load.streams} streams", partial(generation.measure, door, load, seed))
            for seed, load in enumerate(measured, WARM_UP_SEED + 1)
        ),
    ]


def _check_prompts(results: Results) -> None:
    for metric, found in results.values.items():
        if metric.name == PROMPT_TOKENS and len(set(chain(*found.values()))) > 1:
            raise LoadTestFailed(f"the servers read prompts of different lengths: {found}")


if __name__ == "__main__":
    main()
