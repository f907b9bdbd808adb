"""Memory of a thousand waiting streams, and its return."""

import argparse
import asyncio
import resource
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import orjson
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from loadtests.support import rounds, servers
from loadtests.support.http_client import Address, connect, post
from loadtests.support.rounds import LoadTestFailed, save
from loadtests.support.servers import Server, pinned, read_metrics, serving, total
from loadtests.support.stream_client import METHOD, MODEL, TEXT, GrpcConnection, repeat_request

RESPONSES = 1000
DELAY_US = 1_800_000_000
HEADERS_TIMEOUT_SECS = 60.0
OPENED_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Clients:
    """How many streams are held; those of gRPC share `connections`."""

    streams: int
    connections: int


Hold = Callable[[Address, Clients], AbstractAsyncContextManager[None]]
"""Streams that are open inside the block."""


class Waiting(asyncio.Protocol):
    """One HTTP stream that waits; `answered` is set when its headers have come."""

    def __init__(self, request: bytes) -> None:
        self.answered = asyncio.Event()
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self.answered.set()


@asynccontextmanager
async def hold_sse(address: Address, clients: Clients) -> AsyncIterator[None]:
    """Event streams, a connection for each."""
    body = {"text_input": TEXT, "n": RESPONSES, "delay_us": DELAY_US}
    request = post(f"/v2/models/{MODEL}/generate_stream", address, orjson.dumps(body))
    opened: list[tuple[asyncio.Transport, Waiting]] = []
    try:
        for start in range(0, clients.streams, OPENED_AT_ONCE):
            count = min(OPENED_AT_ONCE, clients.streams - start)
            some = (connect(address, lambda: Waiting(request)) for _ in range(count))
            opened += await asyncio.gather(*some)
        async with asyncio.timeout(HEADERS_TIMEOUT_SECS):
            for _, waiting in opened:
                await waiting.answered.wait()
        yield
    finally:
        for transport, _ in opened:
            transport.close()


@asynccontextmanager
async def hold_grpc(address: Address, clients: Clients) -> AsyncIterator[None]:
    """ModelStreamInfer streams that share some connections."""
    request = repeat_request(RESPONSES, DELAY_US)
    opened = [
        await connect(address, lambda: GrpcConnection(address)) for _ in range(clients.connections)
    ]
    streams = [
        opened[number % len(opened)][1].open(METHOD, request) for number in range(clients.streams)
    ]
    try:
        yield
    finally:
        for transport, _ in opened:
            transport.close()
        await asyncio.gather(*streams, return_exceptions=True)


WIRES: dict[str, Hold] = {"SSE": hold_sse, "gRPC": hold_grpc}


REPOSITORY = Path(__file__).parent / "models"
IN_FLIGHT = "gateway_requests_in_flight"
REACH_TIMEOUT_SECS = 60.0
SETTLE_SECS = 1.0
WARM_UP_SHARE = 0.01
SPARE_DESCRIPTORS = 200
KIB, MIB = 2**10, 2**20
GROWTH_LIMIT = 16 * MIB
"""How much more the last repetition may leave behind than the first; allocators vary by 10 MiB."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """The server's memory in bytes: before any client came, while all were there, and after."""

    wire: str
    streams: int
    before: int
    during: int
    after: int
    secs_to_end: float

    @property
    def per_stream(self) -> float:
        """Bytes that one stream takes."""
        return (self.during - self.before) / self.streams


def main() -> None:
    """Measure, print, save, and fail if memory keeps growing."""
    asked = _parser().parse_args()
    console = Console()
    _allow_descriptors(asked.streams)
    with rounds.failures_as_lines("idle_streams"), pinned(asked.client_cpus):
        found = _measure(asked, console)
        console.print(_table(found))
        rows = [asdict(each) | {"per_stream": each.per_stream} for each in found]
        rounds.tell_file(save("idle_streams", vars(asked), rows), console)
        for wire in WIRES:
            _check_growth(wire, [each for each in found if each.wire == wire])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.idle_streams", description=__doc__)
    for name, default, text in (
        ("--streams", 1000, "streams held at the same time"),
        ("--connections", 4, "connections that the gRPC streams share"),
        ("--repetitions", 3, "how often they come and go"),
    ):
        parser.add_argument(
            name,
            type=rounds.positive,
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    servers.add_cpu_flags(parser)
    return parser


def _measure(asked: argparse.Namespace, console: Console) -> Sequence[Repetition]:
    """Each wire has a server of its own, so that one does not change the memory of the other."""
    found: list[Repetition] = []
    with rounds.progress_bar(console) as bar:
        task = bar.add_task("", total=len(WIRES) * asked.repetitions)
        for wire in WIRES:
            bar.update(task, description=f"{wire}, starting")
            with serving(servers.gateway(REPOSITORY).launch(), asked.server_cpus) as server:
                found += uvloop.run(_repeat(wire, asked, server, partial(bar.advance, task)))
    return found


async def _repeat(
    wire: str, asked: argparse.Namespace, server: Server, advance: Callable[[], None]
) -> Sequence[Repetition]:
    warm_up = Clients(max(1, round(asked.streams * WARM_UP_SHARE)), asked.connections)
    await _come_and_go(wire, warm_up, server)
    before = _memory(server)
    found = []
    for _ in range(asked.repetitions):
        clients = Clients(asked.streams, asked.connections)
        during, secs_to_end = await _come_and_go(wire, clients, server)
        found.append(Repetition(wire, asked.streams, before, during, _memory(server), secs_to_end))
        advance()
    return found


async def _come_and_go(wire: str, clients: Clients, server: Server) -> tuple[int, float]:
    """Memory while all streams are open, and the seconds until none is in flight any more."""
    port = server.ports.grpc if wire == "gRPC" else server.ports.http
    async with WIRES[wire](Address(port), clients):
        await _reach(server, clients.streams)
        await asyncio.sleep(SETTLE_SECS)
        during = _memory(server)
        left_at = time.monotonic()
    await _reach(server, 0)
    secs_to_end = time.monotonic() - left_at
    await asyncio.sleep(SETTLE_SECS)
    return during, secs_to_end


async def _reach(server: Server, expected: int) -> None:
    """Wait until that number of requests is in flight."""
    deadline = time.monotonic() + REACH_TIMEOUT_SECS
    while (found := await asyncio.to_thread(_in_flight, server)) != expected:
        if time.monotonic() > deadline:
            raise LoadTestFailed(f"{IN_FLIGHT} is {found}, expected {expected}")
        await asyncio.sleep(0.05)


def _in_flight(server: Server) -> int:
    return int(total(read_metrics(server.ports.metrics), IN_FLIGHT))


def _memory(server: Server) -> int:
    """The resident memory of all the server's processes, in bytes."""
    process = psutil.Process(server.pid)
    family = [process, *process.children(recursive=True)]
    return sum(int(each.memory_info().rss) for each in family)


def _table(found: Sequence[Repetition]) -> Table:
    table = Table(title="Idle streams", title_justify="left")
    table.add_column("wire")
    columns = ("streams", "before, MiB", "during", "after", "KiB/stream", "secs to end")
    for name in columns:
        table.add_column(name, justify="right")
    for each in found:
        sizes = (f"{size / MIB:.1f}" for size in (each.before, each.during, each.after))
        rest = (f"{each.per_stream / KIB:.1f}", f"{each.secs_to_end:.2f}")
        table.add_row(each.wire, str(each.streams), *sizes, *rest)
    return table


def _check_growth(wire: str, found: Sequence[Repetition]) -> None:
    growth = found[-1].after - found[0].after
    if growth > GROWTH_LIMIT:
        raise LoadTestFailed(
            f"{wire}: memory grew by {growth / MIB:.1f} MiB from the first repetition to the "
            f"last, expected at most {GROWTH_LIMIT / MIB:.0f} MiB"
        )


def _allow_descriptors(streams: int) -> None:
    """Let this process, and the server it starts, have a connection for each stream."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = streams + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise SystemExit(f"idle_streams: needs {needed} open files, this system allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))


if __name__ == "__main__":
    main()
