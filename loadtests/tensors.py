"""Small tensors: inferences per second of the gateway and of Triton.

The model `add_sub` adds and subtracts 16 floats: in ONNX Runtime behind the gateway, in a Python
model behind Triton. The client is NVIDIA's perf_analyzer.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from loadtests.support import perf_analyzer, rounds, servers
from loadtests.support.perf_analyzer import Traffic
from loadtests.support.rounds import Better, Metric, Plan, Step, comparison, save
from loadtests.support.servers import Contender, Server, add_triton_flag, gateway, pinned, triton

HERE = Path(__file__).parent
MODEL = "add_sub"
WIRES = {"http": "HTTP", "grpc": "gRPC"}


def main() -> None:
    """Compare, print and save."""
    asked = _parser().parse_args()
    console = Console()
    contenders = [gateway(HERE / "models")]
    if asked.triton:
        contenders.insert(0, triton(asked.triton, HERE / "triton_models"))
    with rounds.failures_as_lines("tensors"), pinned(asked.client_cpus):
        results = rounds.run(_plan(asked, contenders), console)
    names = [contender.name for contender in contenders]
    console.print(comparison("add_sub, 16 floats", results, names))
    rounds.tell_file(save("tensors", vars(asked), results.as_rows()), console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.tensors", description=__doc__)
    add_triton_flag(parser)
    parser.add_argument("--clients", type=rounds.positive_list, default=[1, 8, 32], metavar="N,N")
    perf_analyzer.add_flags(parser)
    rounds.add_flags(parser)
    servers.add_cpu_flags(parser)
    return parser


def _plan(asked: argparse.Namespace, contenders: Sequence[Contender]) -> Plan:
    steps: list[Step] = [
        (f"{wire}, {clients} clients", partial(_step, asked, wire, clients))
        for wire in WIRES
        for clients in asked.clients
    ]
    return Plan(
        contenders, {each.name: steps for each in contenders}, asked.rounds, asked.server_cpus
    )


def _step(
    asked: argparse.Namespace, wire: str, clients: int, server: Server
) -> Mapping[Metric, float]:
    traffic = Traffic(model=MODEL, wire=wire, clients=clients)
    found = perf_analyzer.measure(asked, traffic, server)
    name = WIRES[wire]
    per = {"streams": clients, "noun": "client"}
    return {
        Metric(name=f"{name} infer/s", unit="", better=Better.HIGHER, **per): found.per_sec,
        Metric(name=f"{name} p50", unit="us", better=Better.LOWER, **per): found.p50_us,
        Metric(name=f"{name} p99", unit="us", better=Better.LOWER, **per): found.p99_us,
        Metric(name=f"{name}: CPU of the client", unit="cores", **per): found.client_cores,
    }


if __name__ == "__main__":
    main()
