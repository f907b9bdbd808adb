"""A router with a replica on this machine, and the same models in the server itself.

Large tensors are compared with the same bytes on a socket. The processor time is that of the router
alone: the replica computes what the other server computes, too.
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

from rich.console import Console

from loadtests import fleet_llm, fleet_serve, fleet_tensors, streams
from loadtests.fleet_sessions import cached_shares
from loadtests.llm import MODEL
from loadtests.routing.times import times_of_a_choice
from loadtests.support import rounds
from loadtests.support.http_client import ADD_SUB_BODY, ADD_SUB_PATH, latencies_us
from loadtests.support.results import Line, Metric
from loadtests.support.rounds import Report, Step
from loadtests.support.servers import Server, gateway, replica, serving, spending

HERE = Path(__file__).parent
STEADY_STREAMS, STEADY_RATE, STEADY_SECS = 256, 20_000, 3.0
"""Streams, their responses per second, and the time of a measurement."""


def fleet(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure small inferences, streams and large tensors, through a router and without one.

    At a steady rate the processor time of the router is compared with that of a frontend, too.
    Then tokens of an LLM, the cached part of prompts on several replicas, and the time of a choice.
    """
    parser.add_argument("--streams", type=rounds.positive_list, default=[1, 32], metavar="N,N")
    parser.add_argument("--requests", type=rounds.positive, default=3000, metavar="N")
    parser.add_argument("--secs", type=float, default=streams.SECS, metavar="SECS")
    parser.add_argument(
        "--max-tokens",
        type=rounds.positive,
        default=64,
        metavar="N",
        help="tokens of each answer of the LLM (default: %(default)s)",
    )
    parser.add_argument(
        "--ray-serve",
        action="store_true",
        help="compare with Ray Serve, too: its environment is made at .venv/serve at first",
    )
    rounds.add_flags(parser)
    rounds.run_test(parser, arguments, _fleet)


def _fleet(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
    hosted = replica(HERE / "models")
    fleet_of_it = f"--fleet=static:127.0.0.1:{hosted.ports.grpc}"
    (folder / "empty").mkdir()
    contenders = [
        gateway(HERE / "models"),
        gateway(folder / "empty", "gateway, router", fleet_of_it),
        gateway(HERE / "models", "gateway, 1 frontend", "--frontends=1"),
    ]
    steps: Sequence[Step] = [
        ("add_sub, 1 client", partial(_latency, asked.requests)),
        *(
            (f"{name}, {count} streams", partial(_rate, kind, count, asked.secs))
            for kind, name in streams.NAMES.items()
            if kind in ("sse", "frames")
            for count in asked.streams
        ),
        *(
            (
                f"{wire} at {STEADY_RATE}/s",
                partial(streams.steady_cost, wire, STEADY_STREAMS, STEADY_RATE, STEADY_SECS),
            )
            for wire in streams.WIRES
        ),
    ]
    with serving(hosted, asked.server_cpus):
        title = "A router with a replica, and one server"
        report = rounds.compare_contenders(title, contenders, steps, asked, console)[1]
    tensors = fleet_tensors.compare(asked.rounds, asked.server_cpus, folder / "tensors")
    lines = [*report.lines, *tensors.as_lines()]
    notes = [
        fleet_tensors.describe(tensors),
        cached_shares(folder, asked.server_cpus),
        times_of_a_choice(Random(1)),
    ]
    if lacking := fleet_llm.lacking():
        notes.append(f"{MODEL} was not measured: {lacking}")
    else:
        tokens = fleet_llm.compare(asked, folder / "llm", console)
        lines += tokens.as_lines()
        notes.append(fleet_llm.describe(tokens))
    skipped = fleet_serve.make_environment() if asked.ray_serve else "it needs --ray-serve"
    if skipped:
        notes.append(f"Ray Serve was not measured: {skipped}")
    else:
        peers = fleet_serve.compare(asked.rounds, asked.server_cpus, folder / "serve")
        lines += peers.as_lines()
        notes += fleet_serve.describe(peers)
    return replace(report, lines=lines, notes=notes)


def _rate(kind: str, count: int, secs: float, server: Server) -> Mapping[Metric, float]:
    return streams.rate(server, streams.NAMES[kind], kind, count, secs)


def _latency(requests: int, server: Server) -> Mapping[Metric, float]:
    """The median latency of one client, and the processor time of the server."""
    with spending(server.pid) as spent:
        began = time.perf_counter()
        took_us = latencies_us(server.ports.http, ADD_SUB_PATH, ADD_SUB_BODY, requests)
        secs = time.perf_counter() - began
    line = Line("add_sub HTTP", "infer", 1)
    return {
        **line.costs(requests / secs, spent.secs / requests * 1e6),
        line.lower("latency p50", "us"): statistics.median(took_us),
    }
