"""Streams without an engine: responses per second, and processor time of each response.

The model `repeat` makes all responses, so the figures are those of the server alone.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import orjson
import uvloop
from rich.console import Console

from loadtests.support import rounds
from loadtests.support.http_client import Address
from loadtests.support.results import Line, Metric, Results
from loadtests.support.rounds import Report, Step
from loadtests.support.servers import (
    FRONTENDS,
    GATEWAY,
    SERVER,
    LoadTestFailed,
    Server,
    gateway,
    spending,
)
from loadtests.support.stream_client import Measurement, frames, sse
from loadtests.support.triton import add_triton_flag, triton

HERE = Path(__file__).parent
NAMES = {
    "sse": "SSE",
    "frames": "ModelStreamInfer",
    "aio": "ModelStreamInfer to grpc.aio",
    "official": "ModelStreamInfer to tritonclient",
}
BUSY = 0.9
CLIENT_CPU = "CPU of the client"
LOST = "responses lost"
FAILED = "measurements that stalled"
TRIES = 3
SECS = 3.0


def streams(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure responses per second of the gateway and of Triton, as fast as they can."""
    add_triton_flag(parser)
    parser.add_argument("--streams", type=rounds.positive_list, default=[1, 8], metavar="N,N")
    parser.add_argument(
        "--secs",
        type=float,
        default=SECS,
        metavar="SECS",
        help="length of one measurement, after its warm-up (default: %(default)s)",
    )
    rounds.add_flags(parser)
    rounds.run_test(parser, arguments, _streams)


def _streams(asked: argparse.Namespace, _: Path, console: Console) -> Report:
    contenders = [gateway(HERE / "models")]
    if asked.triton:
        contenders.insert(0, triton(asked.triton, HERE / "triton_models"))
    steps: Sequence[Step] = [
        (f"{kind}, {count}", partial(_rate, kind, count, asked.secs))
        for kind in NAMES
        for count in asked.streams
    ]
    title = "Streams without an engine"
    results, report = rounds.compare_contenders(title, contenders, steps, asked, console)
    return Report(report.table, report.lines, _notes(results))


def _rate(kind: str, count: int, secs: float, server: Server) -> Mapping[Metric, float]:
    return rate(server, NAMES[kind], kind, count, secs)


def rate(
    server: Server, name: str, kind: str, count: int, *limits: float
) -> Mapping[Metric, float]:
    """The rate of `count` streams of a kind; `limits` are those of `measure`.

    LoadTestFailed if the gateway drops a response.
    """
    found, failures = measure(server, kind, count, *limits)
    if server.name.startswith(GATEWAY) and found.responses != found.asked:
        raise LoadTestFailed(f"{name}: found {found.responses} responses, expected {found.asked}")
    line = Line(name, "response", count, "stream")
    spent_us = found.server_secs / found.responses * 1e6
    return {
        **line.costs(found.responses / found.secs, spent_us),
        line.other(CLIENT_CPU, "cores"): found.cpu_secs / found.secs,
        line.other(LOST): found.asked - found.responses,
        line.other(FAILED): failures,
    }


def measure(server: Server, kind: str, count: int, *limits: float) -> tuple[Measurement, int]:
    """One measurement, and the number of failures before it, since streams of a peer may stall.

    `limits` are the seconds, and optionally the responses of each request, by default as many as
    take those seconds.
    """
    failures = 0
    while True:
        try:
            return _measure(server, kind, count, *limits), failures
        except LoadTestFailed:
            failures += 1
            if server.name.startswith(GATEWAY) or failures == TRIES:
                raise


def _measure(server: Server, kind: str, *numbers: float) -> Measurement:
    """One measurement by a client in a process of its own."""
    port = server.ports.http if kind == "sse" else server.ports.grpc
    command = [sys.executable, "-m", "loadtests.support.stream_client", kind]
    command += map(str, (port, server.pid, *numbers))
    client = subprocess.run(command, capture_output=True, text=True, check=False)
    if client.returncode:
        raise LoadTestFailed(f"the client of {server.name} failed ({kind}):\n{client.stderr}")
    return Measurement(**orjson.loads(client.stdout))


def _notes(results: Results) -> Sequence[str]:
    """The figures that a busy client limits, and those of servers that dropped responses."""
    notes = []
    for metric, found in results.values.items():
        for contender, values in found.items():
            cores = results.median(metric, contender)
            if metric.figure == CLIENT_CPU and cores > BUSY:
                notes.append(f"{contender}: {metric}: {cores:.2f}, so the client is the limit")
            elif metric.figure in (LOST, FAILED) and max(values) > 0:
                notes.append(f"{contender}: {metric}: {sum(values):,.0f}")
    return notes


SETTLED_SECS = 2.0
"""Frontends have started by then."""

WIRES = ("SSE", "gRPC")


def frontends(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure processor time per response of many streams at a steady rate.

    `--rate` is the responses per second of all streams; each is written apart, as tokens are.
    """
    parser.add_argument("--streams", type=rounds.positive_list, default=[256, 1024], metavar="N,N")
    parser.add_argument(
        "--frontends",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[0, 1, 2],
        metavar="N,N",
        help="as the server's own flag (default: 0,1,2)",
    )
    parser.add_argument("--rate", type=rounds.positive, default=50_000, metavar="N")
    parser.add_argument("--secs", type=float, default=5.0, metavar="SECS")
    rounds.add_flags(parser)
    rounds.run_test(parser, arguments, _frontends)


def _frontends(asked: argparse.Namespace, _: Path, console: Console) -> Report:
    contenders = [
        gateway(HERE / "models", f"--frontends {count}", f"--frontends={count}")
        for count in asked.frontends
    ]
    steps: Sequence[Step] = [
        (f"{wire}, {count} streams", partial(steady_cost, wire, count, asked.rate, asked.secs))
        for wire in WIRES
        for count in asked.streams
    ]
    title = "Streams at a steady rate"
    return rounds.compare_contenders(title, contenders, steps, asked, console)[1]


def steady_cost(
    wire: str, count: int, per_sec: int, secs: float, server: Server
) -> Mapping[Metric, float]:
    """The processor time of each response of streams that together have that many per second."""
    time.sleep(SETTLED_SECS)
    delay_us = round(count / per_sec * 1e6)
    each = round(secs * 1e6 / delay_us)
    with spending(server.pid) as spent:
        began = time.perf_counter()
        found = uvloop.run(_read_all(wire, server, count, each, delay_us))
        took = time.perf_counter() - began
    if found != count * each:
        raise LoadTestFailed(f"{wire}: found {found} responses, expected {count * each}")
    line, unit_us = Line(f"{wire} at {per_sec}/s", "response", count, "stream"), 1e6 / found
    parts = {"the server": SERVER, "all frontends": FRONTENDS}
    return {
        **line.costs(found / took, spent.secs * unit_us),
        **{
            line.lower(f"processor time of {name}", "us/response"): spent.secs_of(role) * unit_us
            for name, role in parts.items()
        },
    }


async def _read_all(wire: str, server: Server, count: int, each: int, delay_us: int) -> int:
    read, port = (sse, server.ports.http) if wire == "SSE" else (frames, server.ports.grpc)
    found = await asyncio.gather(*(read(Address(port), each, delay_us) for _ in range(count)))
    return sum(stream.responses for stream in found)
