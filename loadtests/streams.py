"""Streams without an engine: responses per second of the gateway and of Triton.

The model `repeat` answers n times at once, so what is measured is the server alone.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import orjson
from rich.console import Console

from loadtests.support import rounds, servers
from loadtests.support.rounds import (
    Better,
    LoadTestFailed,
    Metric,
    Plan,
    Results,
    Step,
    comparison,
    save,
)
from loadtests.support.servers import (
    GATEWAY,
    Contender,
    Server,
    add_triton_flag,
    gateway,
    pinned,
    triton,
)
from loadtests.support.stream_client import Measurement

HERE = Path(__file__).parent
NAMES = {
    "sse": "SSE events/s",
    "frames": "gRPC responses/s",
    "aio": "gRPC/s to grpc.aio",
    "official": "gRPC/s to tritonclient",
}
BUSY = 0.9
CLIENT_CPU = "CPU of the client"
LOST = "responses lost"
FAILED = "measurements that stalled"
TRIES = 3
SECS = 3.0


def main() -> None:
    """Compare, print and save."""
    asked = _parser().parse_args()
    console = Console()
    contenders = [gateway(HERE / "models")]
    if asked.triton:
        contenders.insert(0, triton(asked.triton, HERE / "triton_models"))
    with rounds.failures_as_lines("streams"), pinned(asked.client_cpus):
        results = rounds.run(_plan(asked, contenders), console)
    names = [contender.name for contender in contenders]
    console.print(comparison("Streams without an engine", results, names))
    _warn(results, console)
    rounds.tell_file(save("streams", vars(asked), results.as_rows()), console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.streams", description=__doc__)
    add_triton_flag(parser)
    parser.add_argument("--streams", type=rounds.positive_list, default=[1, 8], metavar="N,N")
    parser.add_argument(
        "--secs",
        type=float,
        default=SECS,
        metavar="SECS",
        help="about how long one measurement takes, after its warm-up (default: %(default)s)",
    )
    rounds.add_flags(parser)
    servers.add_cpu_flags(parser)
    return parser


def _plan(asked: argparse.Namespace, contenders: Sequence[Contender]) -> Plan:
    steps: list[Step] = [
        (f"{kind}, {streams}", partial(_step, kind, streams, asked.secs))
        for kind in NAMES
        for streams in asked.streams
    ]
    return Plan(
        contenders, {each.name: steps for each in contenders}, asked.rounds, asked.server_cpus
    )


def _step(kind: str, streams: int, secs: float, server: Server) -> Mapping[Metric, float]:
    found, failures = measure(server, kind, streams, secs)
    name = NAMES[kind]
    if server.name.startswith(GATEWAY) and found.responses != found.asked:
        raise LoadTestFailed(f"{name}: {found.responses} came, expected {found.asked}")
    return {
        Metric(name, streams, "", Better.HIGHER): found.responses / found.secs,
        Metric(f"{name}: {CLIENT_CPU}", streams, "cores"): found.cpu_secs / found.secs,
        Metric(f"{name}: {LOST}", streams, ""): found.asked - found.responses,
        Metric(f"{name}: {FAILED}", streams, ""): failures,
    }


def measure(
    server: Server, kind: str, streams: int, secs: float, *responses: int
) -> tuple[Measurement, int]:
    """One measurement, and how many failed before it: a peer's streams may stall.

    A request has `responses` responses, by default as many as take `secs`.
    """
    failures = 0
    while True:
        try:
            return _measure(server, kind, streams, secs, *responses), failures
        except LoadTestFailed:
            failures += 1
            if server.name.startswith(GATEWAY) or failures == TRIES:
                raise


def _measure(server: Server, kind: str, *numbers: float) -> Measurement:
    """One measurement by a client in a process of its own."""
    port = server.ports.http if kind == "sse" else server.ports.grpc
    command = [sys.executable, "-m", "loadtests.support.stream_client", kind]
    client = subprocess.run(
        [*command, str(port), *map(str, numbers)], capture_output=True, text=True, check=False
    )
    if client.returncode:
        raise LoadTestFailed(f"the client of {server.name} failed ({kind}):\n{client.stderr}")
    return Measurement(**orjson.loads(client.stdout))


def _warn(results: Results, console: Console) -> None:
    """Say where a figure is the client's rather than the server's, or not of every response."""
    for metric, found in results.values.items():
        for contender, values in found.items():
            cores = results.median(metric, contender)
            if metric.name.endswith(CLIENT_CPU) and cores > BUSY:
                said = f"{metric}: {cores:.2f}, so the client is the limit"
            elif metric.name.endswith((LOST, FAILED)) and max(values) > 0:
                said = f"{metric}: {sum(values):,.0f}"
            else:
                continue
            console.print(f"{contender}: {said}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
