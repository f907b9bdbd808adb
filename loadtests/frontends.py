"""Many streams at a steady rate, as an engine makes them: processor time per response.

Every stream gets a response of `repeat` every so often, so that all of them together ask for
`--rate` responses per second. Each is written apart, as tokens are.
"""

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import orjson
import psutil
import uvloop
from rich.console import Console

from loadtests.support import rounds, servers
from loadtests.support.http_client import Address, EventCounter, connect, post
from loadtests.support.rounds import Better, LoadTestFailed, Metric, Plan, Step, comparison, save
from loadtests.support.servers import Server, gateway, pinned
from loadtests.support.stream_client import METHOD, PATH, TEXT, GrpcConnection, repeat_request

HERE = Path(__file__).parent
SETTLED_SECS = 2.0
"""Frontends have begun by then."""

KINDS = ("SSE", "gRPC")


def main() -> None:
    """Compare, print and save."""
    asked = _parser().parse_args()
    console = Console()
    contenders = [
        gateway(HERE / "models", f"--frontends {count}", f"--frontends={count}")
        for count in asked.frontends
    ]
    steps: Sequence[Step] = [
        (f"{kind}, {streams} streams", partial(_step, kind, streams, asked))
        for kind in KINDS
        for streams in asked.streams
    ]
    plan = Plan(
        contenders, {each.name: steps for each in contenders}, asked.rounds, asked.server_cpus
    )
    with rounds.failures_as_lines("frontends"), pinned(asked.client_cpus):
        results = rounds.run(plan, console)
    names = [contender.name for contender in contenders]
    console.print(comparison("Streams at a steady rate", results, names))
    rounds.tell_file(save("frontends", vars(asked), results.as_rows()), console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.frontends", description=__doc__)
    counts = {"type": rounds.positive_list, "metavar": "N,N"}
    parser.add_argument("--streams", default=[256, 1024], **counts)
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
    servers.add_cpu_flags(parser)
    return parser


def _step(
    kind: str, streams: int, asked: argparse.Namespace, server: Server
) -> Mapping[Metric, float]:
    time.sleep(SETTLED_SECS)
    delay_us = round(streams / asked.rate * 1e6)
    each = round(asked.secs * 1e6 / delay_us)
    before, began = spent_secs(server), time.perf_counter()
    found = uvloop.run(_read_all(kind, server, streams, each, delay_us))
    took, after = time.perf_counter() - began, spent_secs(server)
    if found != streams * each:
        raise LoadTestFailed(f"{kind}: {found} responses came, expected {streams * each}")
    used = {role: (secs - before.get(role, 0)) / found * 1e6 for role, secs in after.items()}
    return {
        Metric(f"{kind} responses/s", streams, "", Better.HIGHER): found / took,
        Metric(f"{kind}: CPU of the server", streams, "us/response", Better.LOWER): used[SERVER],
        Metric(f"{kind}: CPU of all frontends", streams, "us/response", Better.LOWER): used.get(
            "frontends", 0.0
        ),
    }


async def _read_all(kind: str, server: Server, streams: int, each: int, delay_us: int) -> int:
    read = _read_events if kind == KINDS[0] else _read_messages
    reads = [read(server, each, delay_us) for _ in range(streams)]
    return sum(await asyncio.gather(*reads))


async def _read_events(server: Server, count: int, delay_us: int) -> int:
    address = Address(server.ports.http)
    asked = {"text_input": TEXT, "n": count, "delay_us": delay_us}
    request = post(PATH, address, orjson.dumps(asked))
    transport, counter = await connect(address, lambda: EventCounter(request))
    try:
        return (await counter.done).responses
    finally:
        transport.close()


async def _read_messages(server: Server, count: int, delay_us: int) -> int:
    address = Address(server.ports.grpc)
    transport, connection = await connect(address, lambda: GrpcConnection(address))
    try:
        return await connection.open(METHOD, repeat_request(count, delay_us))
    finally:
        transport.close()


SERVER = "server"
ENGINE = "engine"
MODULES = {"gateway.processes": "frontends", "backends.vllm.engine_clients": "clients"}
"""What is on the command lines of the gateway's processes besides the server, and their names."""


def spent_secs(server: Server) -> Mapping[str, float]:
    """Seconds since each process was started, added up by what the processes are."""
    first = psutil.Process(server.pid)
    found: defaultdict[str, float] = defaultdict(float)
    for process in (first, *first.children(recursive=True)):
        role = SERVER if process.pid == server.pid else _role(process)
        found[role] += sum(process.cpu_times()[:2])
    return found


def _role(process: psutil.Process) -> str:
    words = process.cmdline()
    return next((role for module, role in MODULES.items() if module in words), ENGINE)


if __name__ == "__main__":
    main()
