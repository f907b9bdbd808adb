"""Tokens per second of an LLM with small inferences at the same time."""

import argparse
import http.client
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event

from rich.console import Console

from loadtests.support import generation, rounds, servers
from loadtests.support.generation import Load, put
from loadtests.support.http_client import Address
from loadtests.support.repositories import ADD_SUB_BODY, ADD_SUB_PATH
from loadtests.support.rounds import (
    Better,
    LoadTestFailed,
    Metric,
    Plan,
    Results,
    Step,
    save,
    standings,
)
from loadtests.support.servers import GATEWAY, Server, gateway, pinned
from loadtests.support.texts import prompts

TIMEOUT_SECS = 60.0


@dataclass(slots=True)
class Answered:
    """How long each inference took, in seconds from when it was due."""

    took: list[float] = field(default_factory=list)


@contextmanager
def inferring(port: int, per_sec: float) -> Iterator[Answered]:
    """Ask add_sub that often while the block runs; LoadTestFailed if one is refused."""
    answered, stop = Answered(), Event()
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(_ask, port, per_sec, answered, stop)
        try:
            yield answered
        finally:
            stop.set()
        asking.result()


def _ask(port: int, per_sec: float, answered: Answered, stop: Event) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECS)
    due = time.perf_counter()
    while not stop.wait(max(0.0, due - time.perf_counter())):
        connection.request("POST", ADD_SUB_PATH, ADD_SUB_BODY)
        response = connection.getresponse()
        body = response.read()
        if response.status != http.client.OK:
            raise LoadTestFailed(f"add_sub answered {response.status}: {body.decode()}")
        answered.took.append(time.perf_counter() - due)
        due += 1 / per_sec
    connection.close()


HERE = Path(__file__).parent
MODEL, SMALL = "llama", "add_sub"
PROMPT_WORDS = 32
ALONE, BESIDE = "alone", "with inferences beside it"


def main() -> None:
    """Measure, print and save."""
    asked = _parser().parse_args()
    console = Console()
    with (
        rounds.failures_as_lines("beside"),
        pinned(asked.client_cpus),
        tempfile.TemporaryDirectory() as folder,
    ):
        repository = Path(folder)
        (repository / MODEL).symlink_to((HERE.parent / "model_repository" / MODEL).resolve())
        (repository / SMALL).symlink_to((HERE / "models" / SMALL).resolve())
        found = Results()
        plan = Plan(
            [gateway(repository)], {GATEWAY: _steps(asked, found)}, asked.rounds, asked.server_cpus
        )
        rounds.run(plan, console)
    title = f"{MODEL}, {asked.streams} streams, {asked.infer_rate:g} infer/s of {SMALL} beside"
    console.print(standings(title, found, [ALONE, BESIDE]))
    rounds.tell_file(save("beside", vars(asked), found.as_rows()), console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.beside", description=__doc__)
    parser.add_argument("--streams", type=rounds.positive, default=8, metavar="N")
    parser.add_argument("--requests", type=rounds.positive, default=4, metavar="N")
    parser.add_argument("--max-tokens", type=rounds.positive, default=64, metavar="N")
    parser.add_argument("--infer-rate", type=float, default=50.0, metavar="PER_SEC")
    rounds.add_flags(parser)
    servers.add_cpu_flags(parser)
    return parser


def _steps(asked: argparse.Namespace, found: Results) -> Sequence[Step]:
    load = Load(asked.streams, asked.requests, asked.max_tokens)
    return [
        ("warm-up", partial(_warm_up, Load(asked.streams, 1, 16))),
        (ALONE, partial(_alone, load, found)),
        (BESIDE, partial(_beside, load, found, asked.infer_rate)),
    ]


def _warm_up(load: Load, server: Server) -> Mapping[Metric, float]:
    _tokens_per_sec(load, 0, server)
    return {}


def _alone(load: Load, found: Results, server: Server) -> Mapping[Metric, float]:
    found.add(ALONE, {_rate(load): _tokens_per_sec(load, 1, server)})
    return {}


def _beside(load: Load, found: Results, per_sec: float, server: Server) -> Mapping[Metric, float]:
    with inferring(server.ports.http, per_sec) as answered:
        rate = _tokens_per_sec(load, 2, server)
    figures = {
        _rate(load): rate,
        Metric("infer p50", load.streams, "ms", Better.LOWER): _percentile(answered.took, 50),
        Metric("infer p99", load.streams, "ms", Better.LOWER): _percentile(answered.took, 99),
    }
    found.add(BESIDE, figures)
    return {}


def _tokens_per_sec(load: Load, seed: int, server: Server) -> float:
    door = generation.generate(MODEL)
    questions = prompts(PROMPT_WORDS, seed)
    return load.tokens / put(load, Address(server.ports.http), door.encode, questions).secs


def _rate(load: Load) -> Metric:
    return Metric("tokens/s", load.streams, "", Better.HIGHER)


def _percentile(secs: Sequence[float], percent: int) -> float:
    return statistics.quantiles(secs, n=100, method="inclusive")[percent - 1] * 1e3


if __name__ == "__main__":
    main()
