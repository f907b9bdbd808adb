"""When an engine dies: its requests fail at once, it is started again, and the rest goes on."""

import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.conformance.models import identity
from tests.e2e.figures import figures
from tests.e2e.llama import ENDLESS, FRANCE, Llama, streamed, write_llama
from tests.e2e.processes import ENGINE, WORKER, Processes
from tests.raw import Connection
from tests.rpc import StreamRpc, connected, streaming
from tests.serving import Serving, http_get, serving, wait_until, write_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("stored_model"),
]

NOTICED_SECS = 2.0
RESTARTED_SECS = 120.0
ORPHANED_SECS = 10.0
STORY = streamed("Once upon a time", **ENDLESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What was seen when the engine of a server was killed while two clients read its streams."""

    server: Serving
    killed: list[int]
    """The processes of the engine."""
    errors: dict[str, str]
    """What the clients read at the end, by wire."""
    noticed_secs: float
    """How long the model, or the server, was still called ready."""
    meanwhile: dict[str, int]
    """The status of other requests while the engine was away."""
    refusal: httpx.Response
    before: defaultdict[str, float]
    after: defaultdict[str, float]


@pytest.fixture(scope="module")
def incident(stored_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Incident]:
    """A server whose engine has been killed, and has come back."""
    with two_models(tmp_path_factory.mktemp("repository")) as server, Llama(server) as llama:
        llama.expect_answer()
        before = figures(server)
        processes = Processes(server)
        killed = processes.titled(ENGINE) + processes.titled(WORKER)
        with two_streams(server) as (connection, rpc):
            began = time.monotonic()
            os.kill(killed[0], signal.SIGKILL)
            wait_until(lambda: not ready(server), "it is not ready", NOTICED_SECS)
            noticed_secs = time.monotonic() - began
            errors = {"http": last_event(connection), "grpc": last_message(rpc)}
        refusal = llama.post("/generate", FRANCE)
        meanwhile = {
            "live": http_get(server.ports["http"], "/v2/health/live")[0],
            "echo": ask_echo(server),
        }
        wait_until(lambda: ready(server), "the engine is back", RESTARTED_SECS)
        yield Incident(
            server=server,
            killed=killed,
            errors=errors,
            noticed_secs=noticed_secs,
            meanwhile=meanwhile,
            refusal=refusal,
            before=before,
            after=figures(server),
        )


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_streams_of_a_killed_engine_end_with_a_clear_error(incident: Incident, wire: str) -> None:
    assert "model 'llama'" in incident.errors[wire]
    assert "its engine has stopped" in incident.errors[wire]


def test_nothing_is_called_ready_once_an_engine_has_died(incident: Incident) -> None:
    assert incident.noticed_secs < NOTICED_SECS


def test_requests_are_refused_until_the_engine_is_back(incident: Incident) -> None:
    assert incident.refusal.status_code == 503
    assert incident.refusal.headers["retry-after"]
    assert "restart 1 of 3 is under way" in incident.refusal.json()["error"]


def test_other_models_are_served_while_an_engine_is_away(incident: Incident) -> None:
    assert incident.meanwhile == {"live": 200, "echo": 200}


def test_an_engine_that_is_back_answers_as_ever(incident: Incident) -> None:
    with Llama(incident.server) as llama:
        llama.expect_answer()


def test_statistics_outlive_an_engine(incident: Incident) -> None:
    counted = incident.before["nv_inference_request_success"]
    assert incident.after["nv_inference_request_success"] == counted == 1
    assert incident.after["BACKEND"] == len(incident.errors)
    assert incident.after["gateway_requests_in_flight"] == 0


def test_no_process_of_a_killed_engine_is_left(incident: Incident) -> None:
    processes = Processes(incident.server)
    assert len(incident.killed) == len((ENGINE, WORKER))
    assert len(processes.titled(ENGINE)) == len(processes.titled(WORKER)) == 1
    assert not set(incident.killed) & set(processes.others())


def test_an_engine_without_tries_left_is_given_up(tmp_path: Path) -> None:
    with two_models(tmp_path, restart_tries=0) as server, Llama(server) as llama:
        processes = Processes(server)
        (worker,) = processes.titled(WORKER)
        with two_streams(server) as (connection, rpc):
            os.kill(worker, signal.SIGKILL)
            wait_until(lambda: not ready(server), "it is not ready", NOTICED_SECS)
            assert "its engine has stopped" in last_event(connection)
            assert "its engine has stopped" in last_message(rpc)
        server.wait_logged("model given up")
        refusal = llama.post("/generate", FRANCE)
        assert refusal.status_code == 503
        assert "given up after 0 restarts" in refusal.json()["error"]
        assert ask_echo(server) == 200
        processes.wait_none(ORPHANED_SECS)
        assert server.stop() == 0


def test_an_engine_ends_when_its_gateway_is_killed(tmp_path: Path) -> None:
    with two_models(tmp_path) as server:
        processes = Processes(server)
        with two_streams(server):
            server.process.kill()
        processes.wait_none(ORPHANED_SECS)


@pytest.mark.parametrize("title", [ENGINE, WORKER])
def test_an_engine_that_starts_ends_when_its_gateway_is_killed(tmp_path: Path, title: str) -> None:
    write_llama(tmp_path)
    server = Serving(tmp_path)
    try:
        processes = Processes(server)
        wait_until(lambda: bool(processes.titled(title)), f"{title} starts", RESTARTED_SECS)
    finally:
        server.process.kill()
    processes.wait_none(ORPHANED_SECS)
    server.wait_ended()


@contextmanager
def two_models(repository: Path, **parameters: object) -> Iterator[Serving]:
    """A server with the real model, and one that needs no engine."""
    write_llama(repository, **parameters)
    write_model(repository, "echo", identity("BYTES", "1"))
    with serving(repository) as server:
        yield server


@contextmanager
def two_streams(server: Serving) -> Iterator[tuple[Connection, StreamRpc]]:
    """Two clients who have read the beginning of an endless answer."""
    with (
        Connection(server.ports["http"]) as connection,
        connected(server.grpc) as stub,
        streaming(stub) as rpc,
    ):
        connection.ask("/v2/models/llama/generate_stream", STORY.body)
        rpc.ask(STORY.message)
        connection.head()
        assert connection.chunk()
        assert not rpc.answer().error_message
        yield connection, rpc


def last_event(connection: Connection) -> str:
    """The error that ends a stream of events."""
    *_, last = iter(connection.chunk, b"")
    return str(json.loads(last.split(b"data: ")[-1])["error"])


def last_message(rpc: StreamRpc) -> str:
    """The error of a request on a gRPC stream, which goes on itself."""
    while not (message := rpc.answer().error_message):
        assert not rpc.ended
    return str(message)


def ready(server: Serving) -> bool:
    """Whether the model and the server call themselves ready; they must agree."""
    paths = ("/v2/models/llama/ready", "/v2/health/ready")
    return any(http_get(server.ports["http"], path)[0] == 200 for path in paths)


def ask_echo(server: Serving) -> int:
    """The status of a request to the model that needs no engine."""
    url = f"{server.http}/v2/models/echo/generate"
    return httpx.post(url, json={"INPUT": "x"}, timeout=NOTICED_SECS).status_code
