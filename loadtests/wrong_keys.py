"""A client with a key next to others that flood the server with wrong keys: its latency."""

import argparse
import select
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path

from rich.console import Console

from loadtests.support import rounds
from loadtests.support.findings import Finding
from loadtests.support.http_client import (
    ADD_SUB_BODY,
    ADD_SUB_PATH,
    Address,
    post,
    with_headers,
)
from loadtests.support.results import Line, Metric, Results, quantile
from loadtests.support.rounds import Plan, Step
from loadtests.support.servers import GATEWAY, LoadTestFailed, Server, gateway
from loadtests.tenants import Keys, write_tenants

HERE = Path(__file__).parent
RATE, CONNECTIONS = 10_000, 16
LOOK_SECS = 0.005
"""The flood sends what is due each time, so that it takes little of the machine itself."""
MOST_UNANSWERED = 32
"""Requests of a connection that wait for answers; one that is due beyond them is not sent."""
EVERY_SECS = 0.001
"""The client with a key sends a request each millisecond, or as soon as it has an answer."""
WINDOW_SECS, WARM_SECS, START_SECS = 1.0, 0.5, 10.0
PAIRS = 8
MOST_RATIO = 1.2
LINE = Line("a client with a key", "infer")
ALONE_P99, FLOODED_P99 = (LINE.lower(f"p99 {name}", "us") for name in ("alone", "with a flood"))
RATIO = LINE.other("p99 with a flood over alone")


def wrong_keys(
    asked: argparse.Namespace, folder: Path, console: Console, results: Results
) -> Sequence[Finding]:
    """The latency of a client with a key, alone and next to 10,000 wrong keys a second."""
    keys = write_tenants(folder / "keys.toml", {"team": {}})
    contenders = [gateway(HERE / "models", GATEWAY, f"--api-keys={keys.file}")]
    steps: Sequence[Step] = [("wrong keys", partial(_pairs, keys))]
    found = rounds.run(Plan(contenders, {GATEWAY: steps}, asked.rounds, asked.server_cpus), console)
    results.merge(found)
    ratio = results.median(RATIO, GATEWAY)
    return [Finding(figure=RATIO.figure, value=ratio, most=MOST_RATIO)]


def _pairs(keys: Keys, server: Server) -> Mapping[Metric, float]:
    """Medians of pairs of windows, one without and one with the flood."""
    address = Address(server.ports.http)
    request = post(ADD_SUB_PATH, address, ADD_SUB_BODY)
    own, wrong = (
        with_headers(request, headers) for headers in (keys.headers("team"), {"x-api-key": "wrong"})
    )
    p99(address, own)
    pairs = []
    for _ in range(PAIRS):
        alone = p99(address, own)
        with _flooding(address, wrong):
            time.sleep(WARM_SECS)
            pairs.append((alone, p99(address, own)))
    return {
        ALONE_P99: statistics.median(alone for alone, _ in pairs) * 1e6,
        FLOODED_P99: statistics.median(flooded for _, flooded in pairs) * 1e6,
        RATIO: statistics.median(flooded / alone for alone, flooded in pairs),
    }


def p99(address: Address, request: bytes, secs: float = WINDOW_SECS) -> float:
    """The 99th percentile of the seconds to an answer, of requests of one client."""
    found: list[float] = []
    with socket.create_connection((address.host, address.port)) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        until = time.perf_counter() + secs
        due = time.perf_counter()
        while (now := time.perf_counter()) < until:
            time.sleep(max(0.0, due - now))
            began = time.perf_counter()
            client.sendall(request)
            if b" 200 " not in client.recv(1 << 16)[:20]:
                raise LoadTestFailed(f"{address} has refused the client with a key")
            ended = time.perf_counter()
            found.append(ended - began)
            due = max(due + EVERY_SECS, ended)
    return quantile(found, 0.99)


@contextmanager
def _flooding(address: Address, request: bytes) -> Iterator[None]:
    """Flood the server from another process."""
    context = get_context("spawn")
    begun, ended = context.Event(), context.Event()
    flooding = context.Process(target=flood, args=(address, request, begun, ended))
    flooding.start()
    try:
        if not begun.wait(START_SECS):
            raise LoadTestFailed(f"the flood has not begun within {START_SECS:g} s")
        yield
    finally:
        ended.set()
        flooding.join()
    if flooding.exitcode:
        raise LoadTestFailed(f"the flood ended with status {flooding.exitcode}")


def flood(address: Address, request: bytes, begun: Event, ended: Event) -> None:
    """Send a request at each fixed time until `ended` is set; a slow server delays none."""
    clients = [socket.create_connection((address.host, address.port)) for _ in range(CONNECTIONS)]
    for each in clients:
        each.setblocking(False)
    unanswered = dict.fromkeys(clients, 0)
    begun.set()
    began, sent = time.perf_counter(), 0
    while not ended.is_set():
        due = int((time.perf_counter() - began) * RATE)
        for number in range(sent, due):
            client = clients[number % CONNECTIONS]
            if unanswered[client] < MOST_UNANSWERED:
                with suppress(BlockingIOError):
                    client.send(request)
                    unanswered[client] += 1
        sent = due
        for client in select.select(clients, [], [], LOOK_SECS)[0]:
            unanswered[client] -= client.recv(1 << 16).count(b"HTTP/1.1 ")
    for each in clients:
        each.close()
