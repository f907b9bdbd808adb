"""Connections that take every descriptor, or say nothing: all else is still served."""

import os
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests.children import frontends_of
from tests.raw import Connection, get
from tests.rpc import connected
from tests.serving import EVERY_SERVER, WAIT_SECS, Serving, wait_until

FLAGS = ("--http-head-timeout-secs=0",)
"""Clients that say nothing stay: they are what is tested."""

LIMIT = 256
"""Descriptors of each process, of which it needs a few dozen for itself."""

FREE = 16
"""The descriptors that remain for other things than connections, at least."""

SILENT = 10_000
OWN_FILES = 1_000
"""The descriptors of this process and the server besides connections, at most."""

TOKENS = 200
DELAY_US = 10_000
MANY = {"text_input": "x", "n": TOKENS, "delay_us": DELAY_US}
NOISE_SECS = 0.05
"""A gap between tokens that says nothing on a machine which others use as well."""

BUSY_SHARE = 0.2
IDLE_SECS = 1.0
GRPCIO = "--grpc-transport=grpcio"


def processes(server: Serving) -> Sequence[int]:
    """Those that accept connections; the server itself always has the metrics page."""
    return [server.process.pid, *frontends_of(server.process.pid)]


def acceptors(server: Serving) -> Sequence[int]:
    return frontends_of(server.process.pid) or [server.process.pid]


@contextmanager
def limited(pids: Sequence[int], limit: int) -> Iterator[None]:
    """Inside, each process may have `limit` descriptors, or as many as the system allows."""
    before = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(limit, hard), hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@contextmanager
def silent(ports: Sequence[int], count: int) -> Iterator[None]:
    """Inside there are `count` connections that send nothing, by turns to each port."""
    with ExitStack() as stack:
        for number in range(count):
            address = ("127.0.0.1", ports[number % len(ports)])
            stack.enter_context(socket.create_connection(address, WAIT_SECS))
        yield


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def cpu_secs(pids: Sequence[int]) -> float:
    """The processor time that processes have used."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    ticks = sum(int(each[11]) + int(each[12]) for each in stats)
    return ticks / os.sysconf("SC_CLK_TCK")


def is_idle(pids: Sequence[int]) -> bool:
    """Whether processes hardly compute for a while; one that accepts in vain never is."""
    began, used = time.monotonic(), cpu_secs(pids)
    time.sleep(IDLE_SECS)  # what is measured is that nothing happens
    return cpu_secs(pids) - used < BUSY_SHARE * (time.monotonic() - began)


def is_live(server: Serving, stub: Any) -> bool:
    """Whether both ports answer a new client and an old one."""
    try:
        with Connection(server.ports["http"]) as connection:
            connection.send(get("/v2/health/live"))
            is_served = connection.answer().status == 200
        with connected(server.grpc) as new:
            for each in (stub, new):
                each.ServerLive(service_pb2.ServerLiveRequest(), timeout=WAIT_SECS)
    except (OSError, grpc.RpcError):
        return False
    return is_served


@pytest.mark.parametrize("port", ["http", "grpc"])
def test_connections_that_take_every_descriptor_leave_the_others_alone(
    server: Serving, port: str
) -> None:
    pids = acceptors(server)
    with connected(server.grpc) as stub, Connection(server.ports["http"]) as old:
        stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=WAIT_SECS)
        with limited(pids, LIMIT), silent([server.ports[port]], 2 * LIMIT * len(pids)):
            old.send(get("/v2/health/live"))
            assert old.answer().status == 200
            stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=WAIT_SECS)
            if not (port == "grpc" and GRPCIO in EVERY_SERVER):
                wait_until(
                    lambda: all(open_files(pid) <= LIMIT - FREE for pid in pids),
                    "connections leave descriptors free",
                )
            wait_until(lambda: is_idle(pids), "the last connections are accepted or closed")
        wait_until(lambda: is_live(server, stub), "new clients are served")


def gaps(server: Serving) -> list[float]:
    """The seconds between the tokens of a stream, sorted."""
    with Connection(server.ports["http"]) as connection:
        connection.ask("/v2/models/repeat/generate_stream", MANY)
        assert connection.head().status == 200
        times = [time.perf_counter() for _ in iter(connection.chunk, b"")]
    assert len(times) >= TOKENS
    return sorted(later - earlier for earlier, later in pairwise(times))


@pytest.mark.quiet
def test_ten_thousand_silent_connections_do_not_slow_a_stream(server: Serving) -> None:
    pids = processes(server)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(SILENT, hard - OWN_FILES) if hard != resource.RLIM_INFINITY else SILENT
    ports = [server.ports["http"], server.ports["grpc"]]
    alone = gaps(server)
    needed = count + OWN_FILES
    with limited([os.getpid(), *pids], needed), silent(ports, count):
        # Their time limits may already have ended the first ones.
        assert sum(map(open_files, acceptors(server))) > count / 2
        found = gaps(server)
    p99 = int(0.99 * len(alone))
    assert found[p99] <= max(2 * alone[p99], NOISE_SECS)
