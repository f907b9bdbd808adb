"""Python models: the same model.py in the gateway and in Triton.

Small tensors, tensors of 1 MiB, a decoupled model with many responses, business logic that calls
two models, and an ensemble of tokenizer, encoder and pooling.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from gateway.settings import ENVIRONMENT
from gateway.storage.store import default_root
from loadtests import streams
from loadtests.encoders import ONNX
from loadtests.support import perf_analyzer, rounds, servers
from loadtests.support.perf_analyzer import Traffic
from loadtests.support.repositories import ENSEMBLE, of_gateway, of_triton, write_texts
from loadtests.support.rounds import Better, LoadTestFailed, Metric, Plan, Step, comparison, save
from loadtests.support.servers import GATEWAY, Contender, Server, pinned

WIRES = {"http": "HTTP", "grpc": "gRPC"}
DECOUPLED = {"sse": "SSE", "frames": "ModelStreamInfer"}
PARTS = ("small", "large", "decoupled", "business", "ensemble")
FEW = (1, 8)
"""Clients for tests in which more of them show no difference."""
RESPONSES = 1000
"""Of a request to the decoupled model."""


def main() -> None:
    """Compare, print and save."""
    asked = _parser().parse_args()
    console = Console()
    with (
        rounds.failures_as_lines("python"),
        pinned(asked.client_cpus),
        tempfile.TemporaryDirectory() as folder,
    ):
        write_texts(Path(folder) / "texts.json", asked.sentences)
        compared = _contenders(asked, Path(folder))
        results = rounds.run(_plan(asked, compared, Path(folder) / "texts.json"), console)
    console.print(comparison("Python models", results, [each.name for each in compared]))
    rounds.tell_file(save("python", vars(asked), results.as_rows()), console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.python", description=__doc__)
    servers.add_triton_flag(parser)
    parser.add_argument("--clients", type=rounds.positive_list, default=[1, 8, 32], metavar="N,N")
    parser.add_argument(
        "--parts",
        type=_parts,
        default=PARTS,
        metavar="NAME,NAME",
        help=f"what is measured (default: {','.join(PARTS)})",
    )
    parser.add_argument("--sentences", type=rounds.positive, default=1024, metavar="N")
    parser.add_argument(
        "--onnx", type=Path, default=default_root(ENVIRONMENT) / ONNX, metavar="FILE"
    )
    parser.add_argument(
        "--threads",
        type=rounds.positive,
        default=2,
        metavar="N",
        help="threads of ONNX Runtime in Triton (default: %(default)s)",
    )
    perf_analyzer.add_flags(parser)
    rounds.add_flags(parser)
    servers.add_cpu_flags(parser)
    return parser


def _parts(text: str) -> Sequence[str]:
    asked = text.split(",")
    if unknown := set(asked) - set(PARTS):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)}: expected some of {','.join(PARTS)}")
    return asked


def _contenders(asked: argparse.Namespace, folder: Path) -> Sequence[Contender]:
    found = [servers.gateway(of_gateway(folder / "gateway"))]
    if asked.triton:
        theirs = of_triton(folder / "triton", asked.onnx, asked.threads)
        found.insert(0, servers.triton(asked.triton, theirs))
    return found


def _plan(asked: argparse.Namespace, compared: Sequence[Contender], texts: Path) -> Plan:
    steps = [step for part in PARTS if part in asked.parts for step in _steps(part, asked, texts)]
    return Plan(compared, {each.name: steps for each in compared}, asked.rounds, asked.server_cpus)


def _steps(part: str, asked: argparse.Namespace, texts: Path) -> Sequence[Step]:
    return {
        "small": [
            _requests(asked, "add_sub", wire, clients)
            for wire in WIRES
            for clients in asked.clients
        ],
        "large": [_requests(asked, "negate", wire, clients) for wire in WIRES for clients in FEW],
        "decoupled": [_responses(asked, kind, count) for kind in DECOUPLED for count in FEW],
        "business": [_requests(asked, "business", wire, 1) for wire in WIRES],
        "ensemble": [
            _requests(asked, ENSEMBLE, "http", clients, "--input-data", str(texts))
            for clients in asked.clients
        ],
    }[part]


def _requests(asked: argparse.Namespace, model: str, wire: str, clients: int, *extra: str) -> Step:
    traffic = Traffic(model=model, wire=wire, clients=clients, extra=extra)
    return f"{model} over {wire}, {clients} clients", partial(_measure, asked, traffic)


def _responses(asked: argparse.Namespace, kind: str, count: int) -> Step:
    return f"{DECOUPLED[kind]}, {count} streams", partial(_measure_responses, asked, kind, count)


def _measure(asked: argparse.Namespace, traffic: Traffic, server: Server) -> Mapping[Metric, float]:
    found = perf_analyzer.measure(asked, traffic, server)
    name, clients = f"{traffic.model} {WIRES[traffic.wire]}", traffic.clients
    return {
        Metric(f"{name} infer/s", clients, "", Better.HIGHER, "client"): found.per_sec,
        Metric(f"{name} p50", clients, "us", Better.LOWER, "client"): found.p50_us,
        Metric(f"{name} p99", clients, "us", Better.LOWER, "client"): found.p99_us,
        Metric(f"{name}: CPU of the client", clients, "cores", noun="client"): found.client_cores,
    }


def _measure_responses(
    asked: argparse.Namespace, kind: str, count: int, server: Server
) -> Mapping[Metric, float]:
    found, failures = streams.measure(server, kind, count, asked.window_secs, RESPONSES)
    if server.name == GATEWAY and found.responses != found.asked:
        raise LoadTestFailed(f"{kind}: {found.responses} came, expected {found.asked}")
    name = f"repeat {DECOUPLED[kind]}"
    return {
        Metric(f"{name} responses/s", count, "", Better.HIGHER): found.responses / found.secs,
        Metric(f"{name}: CPU of the client", count, "cores"): found.cpu_secs / found.secs,
        Metric(f"{name}: responses lost", count, ""): found.asked - found.responses,
        Metric(f"{name}: measurements that stalled", count, ""): failures,
    }


if __name__ == "__main__":
    main()
