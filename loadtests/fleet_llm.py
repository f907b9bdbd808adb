"""Tokens of SmolLM2 in many streams: through a router with a replica, and of one server."""

import argparse
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from loadtests.llm import MODEL, REPOSITORY, missing_model
from loadtests.support import generation, rounds
from loadtests.support.generation import TEXT, WARM_UP_SEED, Load, line_of
from loadtests.support.results import Results
from loadtests.support.rounds import Plan, Step
from loadtests.support.servers import GATEWAY, Contender, Launch, gateway, replica, serving

ROUTER = "gateway, router"
STREAMS, WARM_UP_TOKENS = 32, 16
PASSES = 2
"""Measurements of each server in a round, since a start takes long."""


def lacking() -> str:
    """The reason why nothing can be measured; "" for none."""
    return missing_model() if find_spec("vllm") else "vllm is not installed"


def compare(asked: argparse.Namespace, folder: Path, console: Console) -> Results:
    """The figures of both, in rounds that alternate."""
    models, empty = folder / "models", folder / "empty"
    for path in (models, empty):
        path.mkdir(parents=True)
    (models / MODEL).symlink_to((REPOSITORY / MODEL).resolve())
    hosted = replica(models, f"replica of {MODEL}", MODEL)
    router = gateway(empty, ROUTER, f"--fleet=static:127.0.0.1:{hosted.ports.grpc}")
    contenders = [gateway(models), Contender(ROUTER, partial(_with_model, router))]
    endpoint = generation.generate(MODEL)
    warm_up = Load(STREAMS, 1, WARM_UP_TOKENS)
    load = Load(STREAMS, 1, asked.max_tokens)
    steps: list[Step] = [
        ("warm-up", partial(generation.warm_up, endpoint, warm_up)),
        *(
            (str(line_of(TEXT, load)), partial(generation.measure, endpoint, load, seed))
            for seed in range(WARM_UP_SEED + 1, WARM_UP_SEED + 1 + PASSES)
        ),
    ]
    plan = Plan(
        contenders, dict.fromkeys((GATEWAY, ROUTER), steps), asked.rounds, asked.server_cpus
    )
    with serving(hosted, asked.server_cpus):
        return rounds.run(plan, console)


def _with_model(router: Contender) -> Launch:
    """A router that is ready once its replica has loaded the model."""
    return replace(router.launch(), ready_path=f"/v2/models/{MODEL}/ready")


def describe(results: Results) -> str:
    """The medians of the tokens a second and their ratio, in words."""
    (rate,) = [each for each in results.values if each == each.line.rate]
    alone, routed = (results.median(rate, name) for name in (GATEWAY, ROUTER))
    ratio = results.ratio(rate, ROUTER, GATEWAY) or 0
    return (
        f"{MODEL}, {rate.line}: one server {alone:.1f} {rate.unit}, through a router {routed:.1f}, "
        f"ratio {ratio:.2f}"
    )
