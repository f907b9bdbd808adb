"""gRPC by both transports of the gateway, and by Triton: small tensors, large ones, and streams.

`add_sub` adds and subtracts 16 floats, `negate` takes 1 MiB and gives as much, `repeat` answers a
stream of requests with many responses each. At half load requests come at a steady rate, and
their latency is measured.
"""

import argparse
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from loadtests import streams
from loadtests.support import perf_analyzer, rounds, servers
from loadtests.support.perf_analyzer import Traffic
from loadtests.support.rounds import Better, Metric, Plan, Step, comparison, save
from loadtests.support.servers import Contender, Server, add_triton_flag, gateway, pinned, triton

HERE = Path(__file__).parent
TRANSPORTS = ("grpcio", "hyper")
SMALL, LARGE = "add_sub", "negate"
STREAM_COUNTS = (1, 4, 64)
PARTS = ("small", "half-load", "large", "streams")


def main() -> None:
    """Compare, print and save."""
    asked = _parser().parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder, rounds.failures_as_lines("transports"):
        contenders = _contenders(asked, Path(folder))
        with pinned(asked.client_cpus):
            results = rounds.run(_plan(asked, contenders), console)
    names = [contender.name for contender in contenders]
    console.print(comparison("gRPC", results, names))
    rounds.tell_file(save("transports", vars(asked), results.as_rows()), console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.transports", description=__doc__)
    add_triton_flag(parser)
    parser.add_argument("--clients", type=rounds.positive_list, default=[1, 8, 32], metavar="N,N")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS, metavar="P,P")
    parser.add_argument(
        "--half-load",
        type=int,
        default=2500,
        metavar="N",
        help="requests per second of the part half-load (default: %(default)s)",
    )
    perf_analyzer.add_flags(parser)
    rounds.add_flags(parser)
    servers.add_cpu_flags(parser)
    return parser


def _contenders(asked: argparse.Namespace, folder: Path) -> Sequence[Contender]:
    ours = _repository(folder / "gateway", HERE / "models")
    found = [gateway(ours, f"gateway, {each}", f"--grpc-transport={each}") for each in TRANSPORTS]
    if asked.triton:
        theirs = _repository(folder / "triton", HERE / "triton_models")
        found.insert(0, triton(asked.triton, theirs))
    return found


def _repository(folder: Path, models: Path) -> Path:
    shutil.copytree(models, folder)
    shutil.copytree(HERE / "python_models" / LARGE, folder / LARGE)
    return folder


def _plan(asked: argparse.Namespace, contenders: Sequence[Contender]) -> Plan:
    steps = [step for part in PARTS if part in asked.parts for step in _steps(part, asked)]
    return Plan(
        contenders, {each.name: steps for each in contenders}, asked.rounds, asked.server_cpus
    )


def _steps(part: str, asked: argparse.Namespace) -> Sequence[Step]:
    rate = ("--request-rate-range", str(asked.half_load))
    return {
        "small": [_requests(asked, SMALL, clients) for clients in asked.clients],
        "half-load": [_requests(asked, SMALL, 0, *rate)],
        "large": [_requests(asked, LARGE, clients) for clients in asked.clients[:2]],
        "streams": [(f"{count} streams", partial(_responses, count)) for count in STREAM_COUNTS],
    }[part]


def _requests(asked: argparse.Namespace, model: str, clients: int, *extra: str) -> Step:
    traffic = Traffic(model=model, wire="grpc", clients=clients, extra=extra)
    return f"{model}, {clients or 'many'} clients", partial(_measure, asked, traffic)


def _measure(asked: argparse.Namespace, traffic: Traffic, server: Server) -> Mapping[Metric, float]:
    found = perf_analyzer.measure(asked, traffic, server)
    if not traffic.clients:
        name = f"{traffic.model} at {asked.half_load} infer/s"
        return {
            Metric(f"{name}, p50", 0, "us", Better.LOWER, "client"): found.p50_us,
            Metric(f"{name}, p99", 0, "us", Better.LOWER, "client"): found.p99_us,
        }
    name, clients = traffic.model, traffic.clients
    return {
        Metric(f"{name} infer/s", clients, "", Better.HIGHER, "client"): found.per_sec,
        Metric(f"{name} p99", clients, "us", Better.LOWER, "client"): found.p99_us,
    }


def _responses(count: int, server: Server) -> Mapping[Metric, float]:
    found, _ = streams.measure(server, "frames", count, streams.SECS)
    return {
        Metric("ModelStreamInfer responses/s", count, "", Better.HIGHER): found.responses
        / found.secs
    }


if __name__ == "__main__":
    main()
