"""Start of a server, its error when it cannot, and its end with requests in flight."""

import queue
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2

from tests.conformance.models import EVERY_VERSION, REPEAT, identity, scripted
from tests.leaving import IN_FLIGHT, accepted
from tests.raw import Connection, get
from tests.rpc import connected, infer_request, streaming
from tests.serving import WAIT_SECS, Serving, http_get, serving, wait_until, write_model

pytestmark = pytest.mark.runs_on("frontends")

LOGGED_ERROR = re.compile(r"E\d{4} ")
SOON_SECS = 6.0
LAST_ANSWERS_SECS = 2.0
HEALTH = health_pb2.HealthCheckResponse
SHORT = {"text_input": "x", "n": 30, "delay_us": 100_000}
LONG = {"text_input": "x", "n": 100_000, "delay_us": 10_000}
ABANDONED = (
    "the server is shutting down and the request did not end within its --exit-timeout-secs of 1"
)
BAD_MODELS = {
    "fails": identity("FP32", load_fails="no such weights"),
    "raises": scripted(load_raises=f"cannot open {Path(__file__)}"),
    "unreadable": 'backend: "identity"\nnonsense: 1\n',
    "homeless": 'backend: "absent"\n',
}
REASONS = {
    "fails": "Internal: no such weights",
    "raises": "Internal: loading failed unexpectedly; the server's log says why",
    "unreadable": "nonsense",
    "homeless": "unable to find backend 'absent'; installed backends: ",
}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A repository with one model of each kind that needs no engine."""
    folder = tmp_path / "models"
    write_model(folder, "repeat", REPEAT)
    write_model(folder, "single", identity("BYTES", "1"))
    return folder


@contextmanager
def ending(repository: Path, *flags: str) -> Iterator[Serving]:
    """A ready server that the block ends; it must end well, and say nothing of a failure."""
    with serving(repository, *flags) as server:
        yield server
        assert server.wait_ended(WAIT_SECS) == 0
    assert "Traceback" not in server.text
    assert not [line for line in server.log if LOGGED_ERROR.match(line)]


@contextmanager
def within(secs: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < secs


def ended(repository: Path, *flags: str, environment: Mapping[str, str] | None = None) -> Serving:
    """A server that cannot start, at its end."""
    server = Serving(repository, flags, environment)
    server.wait_ended()  # a start and an end: on a busy machine imports alone can take seconds
    return server


def refuses_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECS).close()
    except ConnectionRefusedError:
        return True
    return False


def wait_draining(server: Serving) -> None:
    server.wait_logged("draining requests=")
    for port in server.ports.values():
        wait_until(lambda port=port: refuses_connections(port), "nobody is accepted any more")


def refused(stub: Any) -> bool:
    try:
        stub.ModelInfer(infer_request("single", INPUT="x"), timeout=WAIT_SECS)
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


def test_sigterm_lets_streams_end_and_takes_nothing_new(models: Path) -> None:
    with ending(models) as server, connected(server.grpc) as stub, streaming(stub) as rpc:
        with Connection(server.ports["http"]) as connection:
            with accepted(server, "repeat"):
                connection.ask("/v2/models/repeat/generate_stream", SHORT)
            with accepted(server, "repeat"):
                rpc.ask(infer_request("repeat", "a", **SHORT))
            server.begin_stop()
            wait_draining(server)
            assert refused(stub)
            assert connection.answer().body.count(b"data: ") == SHORT["n"]
            assert connection.ended
        found = rpc.until_exit()
        assert [each.error_message for each in found] == [""] * SHORT["n"]
        with within(SOON_SECS):
            server.wait_ended()


def test_what_does_not_end_in_time_is_ended_with_an_error(models: Path) -> None:
    write_model(models, "stuck", identity("BYTES", "1", delay_us=600_000_000, concurrency=0))
    flags = ("--exit-timeout-secs=1", "--http-first-response-secs=0.1")
    with ending(models, *flags) as server, connected(server.grpc) as stub, streaming(stub) as rpc:
        started = Connection(server.ports["http"])
        waiting = Connection(server.ports["http"])
        with started, waiting:
            started.ask("/v2/models/repeat/generate_stream", LONG)
            waiting.ask("/v2/models/stuck/generate", {"INPUT": "x"})
            rpc.ask(infer_request("repeat", "a", **LONG))
            unary = stub.ModelInfer.future(infer_request("stuck", INPUT="x"))
            server.wait_metric(IN_FLIGHT, "repeat", 2)
            server.wait_metric(IN_FLIGHT, "stuck", 2)
            server.begin_stop()
            with within(1 + LAST_ANSWERS_SECS + SOON_SECS):
                assert started.answer().body.endswith(
                    b'}\n\ndata: {"error":"' + ABANDONED.encode() + b'"}\n\n'
                )
                answer = waiting.answer()
                assert (answer.status, answer.json) == (503, {"error": ABANDONED})
                assert answer.headers["retry-after"] == "1"
                assert unary.code() is grpc.StatusCode.UNAVAILABLE
                assert unary.details() == ABANDONED
                *_, last = rpc.until_exit()
                assert last.error_message == ABANDONED
                assert server.wait_ended() == 0
    assert any("drain over" in line for line in server.log)


def test_clients_that_ask_nothing_do_not_hold_up_the_end(models: Path) -> None:
    with ending(models) as server, connected(server.grpc) as stub, streaming(stub) as rpc:
        rpc.ask(infer_request("single", "a", INPUT="x"))
        assert rpc.answer().infer_response.id == "a"
        with grpc.insecure_channel(server.grpc) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == HEALTH.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            questions: queue.Queue[Any] = queue.Queue()
            questions.put(asked)
            listing = reflection.ServerReflectionInfo(iter(questions.get, None))
            assert next(listing).list_services_response.service
            idle, silent, half = (Connection(server.ports["http"]) for _ in range(3))
            with idle, silent, half:
                idle.send(get("/v2/health/live"))
                assert idle.answer().status == 200
                half.send(b"GET /v2/health/li")
                with within(LAST_ANSWERS_SECS + SOON_SECS):
                    assert server.stop() == 0
                assert idle.ended
            questions.put(None)
        assert rpc.until_exit() == []


def test_half_a_request_does_not_hold_up_the_end(models: Path) -> None:
    with (
        ending(models) as server,
        Connection(server.ports["http"]) as connection,
    ):
        connection.send(b"POST /v2/models/repeat/generate HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
        with within(LAST_ANSWERS_SECS + SOON_SECS):
            assert server.stop() == 0


def test_a_client_that_reads_nothing_holds_up_the_end_no_longer_than_it_may(models: Path) -> None:
    flood = {"text_input": "x" * 10_000, "n": 100_000}
    with (
        ending(models, "--exit-timeout-secs=1") as server,
        connected(server.grpc) as stub,
        streaming(stub) as rpc,
        Connection(server.ports["http"], receive_buffer=4096) as connection,
    ):
        with accepted(server, "repeat"):
            connection.ask("/v2/models/repeat/generate_stream", flood)
        with accepted(server, "repeat"):
            rpc.ask(infer_request("repeat", "a", **flood))
        with within(1 + LAST_ANSWERS_SECS + SOON_SECS):
            assert server.stop() == 0


def test_a_second_signal_changes_nothing(models: Path) -> None:
    with ending(models) as server, Connection(server.ports["http"]) as connection:
        with accepted(server, "repeat"):
            connection.ask("/v2/models/repeat/generate_stream", SHORT)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            server.begin_stop(number)
        assert connection.answer().body.count(b"data: ") == SHORT["n"]


def test_a_bad_model_ends_the_server_which_names_it_and_says_why(
    models: Path, environment: dict[str, str]
) -> None:
    for name, config in BAD_MODELS.items():
        write_model(models, name, config)
    server = ended(models, environment=environment)
    assert server.process.returncode == 1
    said = server.text.partition("sluice: failed to load all models:\n")[2].splitlines()
    assert said[-1] == "(--exit-on-error=false serves the others)"
    for name, line in zip(sorted(BAD_MODELS), sorted(said[:-1]), strict=True):
        assert line.startswith(f"  {name}")
        assert REASONS[name] in line
    assert len(said) == len(BAD_MODELS) + 1
    assert str(models) not in "\n".join(said)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.own_models("loads and unloads")
def test_a_bad_model_leaves_the_others_alone_if_it_may(
    models: Path, environment: dict[str, str], strict: bool
) -> None:
    for name, config in BAD_MODELS.items():
        write_model(models, name, config)
    flags = ("--exit-on-error=false", f"--strict-readiness={str(strict).lower()}")
    with serving(models, *flags, environment=environment) as server, connected(server.grpc) as stub:
        with httpx.Client(base_url=server.http) as http:
            assert http.get("/v2/health/live").status_code == 200
            assert http.get("/v2/health/ready").status_code == (400 if strict else 200)
            good = http.post("/v2/models/single/generate", json={"INPUT": "x"})
            assert good.json()["OUTPUT"] == "x"
            for name in BAD_MODELS:
                answer = http.get(f"/v2/models/{name}/ready")
                seen = "is not found" if name == "unreadable" else "has no available versions"
                text = f"Request for unknown model: '{name}' {seen}"
                assert (answer.status_code, answer.json()) == (404, {"error": text})
            answer = http.get("/v2/models/fails/versions/1/ready")
            text = "Request for unknown model: 'fails' version 1 is not at ready state"
            assert (answer.status_code, answer.json()) == (503, {"error": text})
        ready = stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=WAIT_SECS)
        assert ready.ready is not strict
        for name in BAD_MODELS:
            request = service_pb2.ModelReadyRequest(name=name)
            assert stub.ModelReady(request, timeout=WAIT_SECS).ready is False
        for reason in REASONS.values():
            assert reason in server.text


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_a_port_in_use_is_one_clear_line(models: Path, wire: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = ended(models, f"--{wire}-port={port}")
    assert server.process.returncode == 1
    (line,) = server.said
    assert line.startswith(f"sluice: cannot listen on 127.0.0.1:{port}: Address")


@pytest.mark.parametrize("wires", [("http", "grpc"), ("http", "metrics")])
def test_two_frontends_on_one_port_are_refused(models: Path, wires: tuple[str, str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    server = ended(models, *(f"--{wire}-port={port}" for wire in wires))
    assert server.process.returncode == 1
    assert server.log[-1].startswith(f"sluice: cannot listen on 127.0.0.1:{port}: ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--no-such-flag",), "--no-such-flag"),
        (("stray",), "stray"),
        (("--http-port=x",), "'x' is no port"),
        (("--exit-on-error=maybe",), "invalid value for bool option: maybe"),
        (("--exit-timeout-secs=-1",), "'-1' is no duration"),
    ],
)
def test_a_flag_that_cannot_be_understood_is_named(
    models: Path, flags: tuple[str, ...], said: str
) -> None:
    server = ended(models, *flags)
    assert server.process.returncode == 1
    assert server.log[0].startswith("usage: sluice")
    assert said in server.log[-1]


def test_a_repository_that_does_not_exist_is_one_clear_line(tmp_path: Path) -> None:
    server = ended(tmp_path / "absent")
    assert server.process.returncode == 1
    assert server.said == ["sluice: folder 'absent' does not exist"]


def test_an_empty_repository_is_served(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert http_get(server.ports["http"], "/v2/health/ready") == (200, b"")


def test_two_repositories_are_served_as_one(models: Path, tmp_path: Path) -> None:
    other = tmp_path / "others"
    write_model(other, "more", REPEAT)
    with serving(models, f"--model-repository={other}", "--id=mine") as server:
        assert http_get(server.ports["http"], "/v2/models/more/ready")[0] == 200
        assert http_get(server.ports["http"], "/v2/models/single/ready")[0] == 200
        assert b'"name":"mine"' in http_get(server.ports["http"], "/v2")[1]


def test_a_model_in_two_repositories_is_refused(models: Path, tmp_path: Path) -> None:
    other = tmp_path / "others"
    write_model(other, "single", REPEAT)
    server = ended(models, f"--model-store={other}")
    assert server.process.returncode == 1
    assert "single: model appears in two or more repositories" in server.text


def test_version_policies_decide_which_versions_are_served(tmp_path: Path) -> None:
    policies = {
        "default": ("", ["10"]),
        "all": (EVERY_VERSION, ["1", "2", "10"]),
        "latest": ("version_policy { latest { num_versions: 2 } }\n", ["2", "10"]),
        "specific": ("version_policy { specific { versions: [1, 10, 99] } }\n", ["1", "10"]),
    }
    for name, (policy, _) in policies.items():
        write_model(tmp_path, name, REPEAT + policy, versions=(1, 2, 10, "notes", "03"))
    with serving(tmp_path) as server, httpx.Client(base_url=server.http) as http:
        for name, (_, versions) in policies.items():
            assert http.get(f"/v2/models/{name}").json()["versions"] == versions
            for version in ("1", "2", "10"):
                answer = http.get(f"/v2/models/{name}/versions/{version}/ready")
                assert answer.status_code == (200 if version in versions else 404)
        body = {"text_input": "x", "n": 1}
        assert http.post("/v2/models/all/generate", json=body).json()["model_version"] == "10"


def test_a_model_that_is_loading_is_not_ready_and_answers_503(
    models: Path, environment: dict[str, str]
) -> None:
    write_model(models, "tardy", scripted({"text": "x", "final": True}))
    (held := models / "tardy" / "1" / "held").touch()
    server = Serving(models, ("--http-port", "0"), environment).wait_listening()
    try:
        wait_until(lambda: not refuses_connections(server.ports["http"]), "the port answers")
        with connected(server.grpc) as stub, httpx.Client(base_url=server.http) as http:
            assert http.get("/v2/health/live").status_code == 200
            assert http.get("/v2/health/ready").status_code == 400
            wait_until(lambda: http.get("/v2/models/single/ready").status_code == 200, "one loads")
            answer = http.post("/v2/models/tardy/generate", json={"text_input": "x"})
            text = "Request for unknown model: 'tardy' is still loading"
            assert (answer.status_code, answer.json()) == (503, {"error": text})
            assert answer.headers["retry-after"] == "1"
            assert http.get("/v2/models/tardy/ready").status_code == 503
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(infer_request("tardy", text_input="x"), timeout=WAIT_SECS)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == text
            live = stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=WAIT_SECS)
            ready = stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=WAIT_SECS)
            assert (live.live, ready.ready) == (True, False)
            held.unlink()
            server.wait_ready()
            assert http.get("/v2/health/ready").status_code == 200
            answer = http.post("/v2/models/tardy/generate", json={"text_input": "x"})
            assert answer.json()["text_output"] == "x"
    finally:
        assert server.stop() == 0


def test_a_signal_while_models_load_ends_the_server(
    models: Path, environment: dict[str, str]
) -> None:
    write_model(models, "tardy", scripted(load_secs=600))
    server = Serving(models, (), environment).wait_listening()
    server.wait_logged("loading model model=tardy")
    with within(SOON_SECS):
        assert server.stop(signal.SIGINT) == 0
    assert "Traceback" not in server.text


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_a_frontend_may_be_left_out(models: Path, wire: str) -> None:
    with serving(models, f"--allow-{wire}=false") as server:
        assert server.ports.keys() == {"http", "grpc", "metrics"} - {wire}
    assert server.process.returncode == 0


def test_health_of_grpc_follows_the_server(models: Path, environment: dict[str, str]) -> None:
    write_model(models, "tardy", scripted(load_secs=0.7))
    server = Serving(models, (), environment).wait_listening()
    try:
        with grpc.insecure_channel(server.grpc) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService")
            watch = stub.Watch(request, timeout=2 * WAIT_SECS, wait_for_ready=True)
            seen = [next(watch).status]
            while seen[-1] != HEALTH.SERVING:
                seen.append(next(watch).status)
            server.begin_stop()
            seen.append(next(watch).status)
            with pytest.raises(grpc.RpcError) as caught:
                next(watch)
            assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert seen[-2:] == [HEALTH.SERVING, HEALTH.NOT_SERVING]
    finally:
        assert server.wait_ended(WAIT_SECS) == 0
