"""Memory of waiting streams and its return, and the latency of another client meanwhile."""

import argparse
import asyncio
import resource
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from loadtests.support import rounds, servers
from loadtests.support.http_client import (
    ADD_SUB_BODY,
    ADD_SUB_PATH,
    Address,
    connect,
    post,
    posting,
)
from loadtests.support.results import Line, Results
from loadtests.support.rounds import Report
from loadtests.support.servers import (
    GATEWAY,
    LoadTestFailed,
    Server,
    descendants,
    in_flight,
    resident_bytes,
    serving,
)
from loadtests.support.stream_client import METHOD, MODEL, TEXT, GrpcConnection, repeat_request

RESPONSES = 1000
DELAY_US = 1_800_000_000
HEADERS_TIMEOUT_SECS = 60.0
OPENED_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Clients:
    """Numbers of concurrent streams, and of the connections that those of gRPC share."""

    streams: int
    connections: int


Hold = Callable[[Address, Clients], AbstractAsyncContextManager[None]]
"""Streams that are open inside the block."""


class Waiting(asyncio.Protocol):
    """One waiting HTTP stream; `answered` is set by its first bytes."""

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
REACH_TIMEOUT_SECS = 60.0
SETTLE_SECS = 1.0
WARM_UP_SHARE = 0.01
PROBES = 2000
PROBES_TO_WARM_UP = 200
SPARE_DESCRIPTORS = 200
KIB, MIB = 2**10, 2**20
GROWTH_LIMIT = 16 * MIB
"""The most growth from the first repetition to the last; allocators vary by 10 MiB."""


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency of one client that infers with `add_sub`, in microseconds."""

    p50_us: float
    p99_us: float

    def __str__(self) -> str:
        return f"{self.p50_us:.0f}, {self.p99_us:.0f}"


@dataclass(frozen=True, slots=True)
class Repetition:
    """The server's memory in bytes: before the streams, during all of them, and after.

    The latency is that of another client, before and during the streams.
    """

    wire: str
    streams: int
    before: int
    during: int
    after: int
    secs_to_end: float
    latency_before: Latency
    latency_during: Latency

    @property
    def per_stream(self) -> float:
        """Bytes that one stream takes."""
        return (self.during - self.before) / self.streams


def idle_streams(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure the memory of waiting streams and another client; LoadTestFailed if it grows."""
    for name, default, text in (
        ("--streams", 1000, "concurrent streams"),
        ("--connections", 4, "connections that the gRPC streams share"),
        ("--repetitions", 3, "repetitions of all streams"),
    ):
        parser.add_argument(
            name,
            type=rounds.positive,
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    rounds.run_test(parser, arguments, _idle_streams)


def _idle_streams(asked: argparse.Namespace, _: Path, console: Console) -> Report:
    _allow_descriptors(asked.streams)
    found = _measure(asked, console)
    growth = (_growth(wire, [each for each in found if each.wire == wire]) for wire in WIRES)
    return Report(_table(found), _lines(found), failure="; ".join(filter(None, growth)))


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
    await _open_and_close(wire, warm_up, server)
    alone = await asyncio.to_thread(_latency, server)
    before = _memory(server)
    found = []
    for _ in range(asked.repetitions):
        clients = Clients(asked.streams, asked.connections)
        during, beside, secs_to_end = await _open_and_close(wire, clients, server)
        after = _memory(server)
        found.append(
            Repetition(wire, asked.streams, before, during, after, secs_to_end, alone, beside)
        )
        alone = await asyncio.to_thread(_latency, server)
        advance()
    return found


async def _open_and_close(
    wire: str, clients: Clients, server: Server
) -> tuple[int, Latency, float]:
    """Memory and latency while all streams are open, and seconds from their close to the end."""
    port = server.ports.grpc if wire == "gRPC" else server.ports.http
    async with WIRES[wire](Address(port), clients):
        await _reach(server, clients.streams)
        await asyncio.sleep(SETTLE_SECS)
        during = _memory(server)
        latency = await asyncio.to_thread(_latency, server)
        left_at = time.monotonic()
    await _reach(server, 0)
    secs_to_end = time.monotonic() - left_at
    await asyncio.sleep(SETTLE_SECS)
    return during, latency, secs_to_end


def _latency(server: Server) -> Latency:
    with posting(Address(server.ports.http), ADD_SUB_PATH, ADD_SUB_BODY) as infer:
        for _ in range(PROBES_TO_WARM_UP):
            infer()
        secs = sorted(_secs_of(infer) for _ in range(PROBES))
    return Latency(secs[PROBES // 2] * 1e6, secs[PROBES * 99 // 100] * 1e6)


def _secs_of(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


async def _reach(server: Server, expected: int) -> None:
    """Wait until `expected` requests are in flight."""
    deadline = time.monotonic() + REACH_TIMEOUT_SECS
    while (found := await asyncio.to_thread(in_flight, server)) != expected:
        if time.monotonic() > deadline:
            raise LoadTestFailed(f"found {found} requests in flight, expected {expected}")
        await asyncio.sleep(0.05)


def _memory(server: Server) -> int:
    """The resident memory of all the server's processes, in bytes."""
    return sum(map(resident_bytes, (server.pid, *descendants(server.pid))))


def _table(found: Sequence[Repetition]) -> Table:
    table = Table(title="Idle streams", title_justify="left")
    table.add_column("wire")
    columns = ("streams", "before, MiB", "during", "after", "KiB/stream", "secs to end")
    columns += ("p50, p99 before, us", "during")
    for name in columns:
        table.add_column(name, justify="right")
    for each in found:
        sizes = (f"{size / MIB:.1f}" for size in (each.before, each.during, each.after))
        rest = (f"{each.per_stream / KIB:.1f}", f"{each.secs_to_end:.2f}")
        latencies = (str(each.latency_before), str(each.latency_during))
        table.add_row(each.wire, str(each.streams), *sizes, *rest, *latencies)
    return table


def _lines(found: Sequence[Repetition]) -> Sequence[Mapping[str, Any]]:
    results = Results()
    for each in found:
        line = Line(f"idle {each.wire}", "stream", each.streams, "stream")
        sizes = {"before": each.before, "during": each.during, "after": each.after}
        figures = {
            line.lower("memory", "KiB/stream"): each.per_stream / KIB,
            line.other("time to end", "s"): each.secs_to_end,
            **{line.other(name, "MiB"): size / MIB for name, size in sizes.items()},
        }
        results.add(GATEWAY, figures)
    return results.as_lines()


def _growth(wire: str, found: Sequence[Repetition]) -> str:
    """The failure of a wire whose memory grows; "" for none."""
    growth = found[-1].during - found[0].during
    if growth <= GROWTH_LIMIT:
        return ""
    return (
        f"{wire}: memory grew by {growth / MIB:.1f} MiB from the first repetition to the last, "
        f"expected at most {GROWTH_LIMIT / MIB:.0f} MiB"
    )


def _allow_descriptors(streams: int) -> None:
    """Raise the limit of open files, of the server too, to a connection for each stream."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = streams + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise LoadTestFailed(f"the limit of open files is {hard}, expected at least {needed}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
