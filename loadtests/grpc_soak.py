"""An hour of mixed gRPC load, good clients and bad: does the server's memory stay flat?"""

import argparse
import asyncio
import csv
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import uvloop
from rich.console import Console

from loadtests import contenders, cpus, rounds
from loadtests.cpus import pinned
from loadtests.curves import Panel, draw
from loadtests.results import FOLDER
from loadtests.rounds import LoadTestFailed
from loadtests.server import Server, serving
from loadtests.soak_load import KINDS, Load, write_models
from loadtests.sse import Address
from loadtests.token_counters import read_metrics, total

MIB = 2**20
GROWTH_LIMIT = 24 * MIB
"""How much higher the last third may be than the middle one; allocators vary by 10 MiB."""

FILES_LIMIT = 20
SHOWN = 5
IN_FLIGHT = "gateway_requests_in_flight"
END_SECS = 30.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment; `done` is what clients did since the one before, by kind."""

    secs: float
    resident_bytes: int
    open_files: int
    per_sec: float
    done: Mapping[str, int]


def main() -> None:
    """Load, sample, draw, and fail if memory keeps growing or a good client met an error."""
    asked = _parser().parse_args()
    console = Console()
    with rounds.failures_as_lines("grpc_soak"), pinned(asked.client_cpus):
        samples, surprises = _soak(asked)
        _write(asked, samples)
        console.print(f"{asked.to.with_suffix('.csv')} and {asked.to.with_suffix('.svg')}")
        for line in surprises[:SHOWN]:
            console.print(line, markup=False)
        _check(samples, surprises)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.grpc_soak", description=__doc__)
    for name, default, text in (
        ("--secs", 3600, "how long"),
        ("--every", 5, "seconds between samples"),
    ):
        parser.add_argument(
            name, type=rounds.positive, default=default, help=f"{text} (default: %(default)s)"
        )
    parser.add_argument("--transport", choices=("hyper", "grpcio"), default="hyper")
    parser.add_argument(
        "--to", type=Path, default=FOLDER / "grpc_soak", help="where to write, without a suffix"
    )
    cpus.add_flags(parser)
    return parser


def _soak(asked: argparse.Namespace) -> tuple[Sequence[Sample], Sequence[str]]:
    with TemporaryDirectory() as folder:
        write_models(Path(folder))
        flag = f"--grpc-transport={asked.transport}"
        launch = contenders.gateway(Path(folder), contenders.GATEWAY, flag).launch()
        with serving(launch, asked.server_cpus) as server:
            return uvloop.run(_load_and_sample(server, asked.secs, asked.every))


async def _load_and_sample(
    server: Server, secs: float, every: float
) -> tuple[Sequence[Sample], Sequence[str]]:
    load, samples = Load(Address(server.ports.grpc)), []
    clients = asyncio.create_task(load.run())
    began, before = time.monotonic(), Counter[str]()
    while (now := time.monotonic() - began) < secs and not clients.done():
        await asyncio.sleep(every)
        samples.append(_sample(server, time.monotonic() - began, now, load.done - before))
        before = Counter(load.done)
    clients.cancel()
    with suppress(asyncio.CancelledError):
        await clients
    await _require_idle(server)
    return samples, load.surprises


def _sample(server: Server, now: float, before: float, done: Mapping[str, int]) -> Sample:
    process = psutil.Process(server.pid)
    return Sample(
        secs=now,
        resident_bytes=process.memory_info().rss,
        open_files=process.num_fds(),
        per_sec=sum(done.values()) / (now - before),
        done={kind: done.get(kind, 0) for kind in KINDS},
    )


async def _require_idle(server: Server) -> None:
    """Wait until nothing is left of what clients asked."""
    deadline = time.monotonic() + END_SECS
    while found := await asyncio.to_thread(_in_flight, server):
        if time.monotonic() > deadline:
            raise LoadTestFailed(f"{found:g} requests are in flight after the last client left")
        await asyncio.sleep(0.1)


def _in_flight(server: Server) -> float:
    return total(read_metrics(server.ports.metrics), IN_FLIGHT)


def _write(asked: argparse.Namespace, samples: Sequence[Sample]) -> None:
    asked.to.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(each) | each.done for each in samples]
    with asked.to.with_suffix(".csv").open("w", newline="") as file:
        columns = ["secs", "resident_bytes", "open_files", "per_sec", *KINDS]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    draw(
        asked.to.with_suffix(".svg"),
        f"gRPC soak, {asked.transport}, {asked.secs / 60:g} minutes",
        [each.secs for each in samples],
        [
            Panel("resident memory, MiB", [each.resident_bytes / MIB for each in samples]),
            Panel("open files", [each.open_files for each in samples]),
            Panel("actions of clients per second", [each.per_sec for each in samples]),
        ],
    )


def _check(samples: Sequence[Sample], surprises: Sequence[str]) -> None:
    if surprises:
        raise LoadTestFailed(f"{len(surprises)} times a client met what it should not")
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[2 * third :]
    if not middle:
        raise LoadTestFailed("too short to tell: three samples are needed")
    growth = _memory(last) - _memory(middle)
    if growth > GROWTH_LIMIT:
        raise LoadTestFailed(f"memory grew by {growth / MIB:.1f} MiB from the middle to the end")
    files = max(each.open_files for each in last) - max(each.open_files for each in middle)
    if files > FILES_LIMIT:
        raise LoadTestFailed(f"{files} files more are open at the end than in the middle")


def _memory(samples: Sequence[Sample]) -> float:
    return statistics.median(each.resident_bytes for each in samples)


if __name__ == "__main__":
    main()
