"""`--frontends N`: what the death of a process costs, and what it does not."""

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.children import command, frontends_of
from tests.conformance.models import REPEAT, identity
from tests.fork_server import fresh
from tests.leaving import IN_FLIGHT
from tests.raw import Connection
from tests.rpc import connected, infer_request, streaming
from tests.serving import Serving, http_get, running, serving, wait_until, write_model

COUNT = 2
STREAMS = 16
"""Enough that both processes surely have some: the system spreads connections at random."""

TICKING = {"text_input": "x", "n": 100_000, "delay_us": 20_000}
PATH = "/v2/models/repeat/generate_stream"
READY = "/v2/health/ready"
ESTABLISHED = 1
"""The state of a connection that both ends may use, in Linux' `tcp_states.h`."""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    write_model(folder, "repeat", REPEAT)
    write_model(folder, "single", identity("BYTES", "1"))
    return folder


@pytest.fixture
def server(models: Path) -> Iterator[Serving]:
    with serving(models, f"--frontends={COUNT}") as started:
        yield started
    assert started.process.returncode == 0
    assert "Traceback" not in started.text


def frontends(server: Serving) -> Sequence[int]:
    """The processes that have the connections."""
    return frontends_of(server.process.pid)


def counted(server: Serving) -> tuple[float, float]:
    """The number of processes by the metrics, and of those that were started again."""
    found = server.metrics()
    return found["gateway_frontends"], found["gateway_frontend_restarts_total"]


def is_connected(client: Connection) -> bool:
    """Whether the server has not closed the connection, also if there is more to read."""
    (state,) = client.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state == ESTABLISHED


def test_the_configured_number_of_processes_listens_and_the_server_itself_does_not(
    models: Path,
) -> None:
    """They start as users start them."""
    with running(Serving(models, [f"--frontends={COUNT}"], start=fresh)) as server:
        wait_until(lambda: len(frontends(server)) == COUNT, "all are there")
        wait_until(lambda: counted(server) == (COUNT, 0), "they are counted")
        assert http_get(server.ports["http"], READY)[0] == 200
        with connected(server.grpc) as stub:
            assert stub.ModelInfer(infer_request("single", INPUT="x")).model_name == "single"


def test_a_killed_process_drops_only_its_own_clients_and_is_started_again(
    server: Serving,
) -> None:
    wait_until(lambda: len(frontends(server)) == COUNT, "all are there")
    with ExitStack() as stack:
        clients = [stack.enter_context(Connection(server.ports["http"])) for _ in range(STREAMS)]
        for client in clients:
            client.ask(PATH, TICKING)
            assert client.head().status == 200
        server.wait_metric(IN_FLIGHT, "repeat", STREAMS)
        victim, survivor = frontends(server)
        os.kill(victim, signal.SIGKILL)
        server.wait_logged("ended")
        left = sum(map(is_connected, clients))
        assert 0 < left < STREAMS
        server.wait_metric(IN_FLIGHT, "repeat", left)
        wait_until(lambda: len(frontends(server)) == COUNT, "there is another one")
        assert survivor in frontends(server)
        wait_until(lambda: counted(server) == (COUNT, 1), "one was started again")
        for _ in range(STREAMS):
            assert http_get(server.ports["http"], READY)[0] == 200
        assert server.metric(IN_FLIGHT, "repeat") == left
    server.wait_metric(IN_FLIGHT, "repeat", 0)


def test_streams_end_by_themselves_when_the_server_stops(server: Serving) -> None:
    thirty = {**TICKING, "n": 30, "delay_us": 100_000}
    with Connection(server.ports["http"]) as client, connected(server.grpc) as stub:
        client.ask(PATH, thirty)
        assert client.head().status == 200
        with streaming(stub) as rpc:
            rpc.ask(infer_request("repeat", "a", **thirty))
            server.wait_metric(IN_FLIGHT, "repeat", 2)
            server.begin_stop()
            assert client.rest().count(b"data: ") == 30
            assert len([rpc.answer() for _ in range(30)]) == 30
    assert server.wait_ended() == 0


def test_without_the_server_no_process_stays(models: Path) -> None:
    with serving(models, f"--frontends={COUNT}") as server:
        wait_until(lambda: len(frontends(server)) == COUNT, "all are there")
        found = frontends(server)
        server.process.kill()
        wait_until(lambda: not any(map(command, found)), "they have ended")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--frontends=-1",), "expected a whole number of at least 0"),
        (
            ("--frontends=2", "--grpc-transport=grpcio"),
            "--frontends needs --grpc-transport=hyper, found grpcio",
        ),
    ],
    ids=["negative", "another transport"],
)
def test_what_cannot_be_is_refused(models: Path, flags: Sequence[str], said: str) -> None:
    server = Serving(models, flags)
    assert server.wait_ended() == 1
    assert said in server.text
