"""Streams that are cut and resumed, and requests that are made twice, on both wires."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.grpc import service_pb2

from gateway.fleet.handshake import NAME_CHARS
from tests.conformance.models import REPEAT, identity
from tests.leaving import IN_FLIGHT, accepted
from tests.raw import Connection, get
from tests.rpc import connected, infer_request, streaming
from tests.serving import FLEET, WAIT_SECS, Serving, held, serving, wait_until, write_model

pytestmark = pytest.mark.runs_on("grpcio", "frontends")

PATH = "/v2/models/repeat/generate_stream"
COUNT = 6
GRACE_SECS = 0.3
EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")
EVENT = re.compile(rb"id: ([\w-]+)\.(\d+)\n(data: .*\n\n)")
ASK = {"text_input": "x", "n": COUNT, "delay_us": 2_000}
LONG = {"text_input": "x", "n": 100_000, "delay_us": 10_000}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A repository with one model of each kind."""
    folder = tmp_path / "models"
    write_model(folder, "repeat", REPEAT)
    write_model(folder, "single", identity("BYTES", "1"))
    return folder


def asked(connection: Connection, question: Mapping[str, Any] = ASK) -> str:
    """Ask for a resumable stream; its token."""
    connection.ask(PATH, {**question, "resumable": True})
    return connection.head().headers["sluice-stream"]


def take(connection: Connection, count: int) -> bytes:
    """Read `count` events; bytes that arrive with the last of them are dropped."""
    body = b""
    while len(EVENT.findall(body)) < count:
        body += connection.chunk()
    return b"".join(found[0] for found in [*EVENT.finditer(body)][:count])


def rest(server: Serving, token: str, number: int) -> bytes:
    """The text behind an event."""
    with Connection(server.ports["http"]) as connection:
        connection.send(get(PATH, f"Last-Event-ID: {token}.{number}"))
        return connection.answer().body


def numbers(body: bytes) -> list[int]:
    return [int(number) for _, number, _ in EVENT.findall(body)]


@pytest.mark.parametrize("got", range(COUNT + 1))
@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_is_cut_anywhere_costs_nothing(
    server: Serving, got: int, reset: bool
) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.ask(PATH, ASK)
        unbroken = connection.answer().body
    with Connection(server.ports["http"]) as connection:
        token = asked(connection)
        before = take(connection, got)
        if reset:
            connection.reset()
    found = EVENT.findall(before + rest(server, token, got))
    assert [int(number) for _, number, _ in found] == list(range(1, COUNT + 1))
    assert b"".join(data for _, _, data in found) == unbroken


def test_several_may_follow_and_each_gets_everything(server: Serving) -> None:
    with Connection(server.ports["http"]) as connection, ThreadPoolExecutor() as pool:
        token = asked(connection, {**ASK, "n": 100})
        others = [pool.submit(rest, server, token, 0) for _ in range(3)]
        found = [connection.rest(), *(other.result(WAIT_SECS) for other in others)]
    assert [numbers(body) for body in found] == [list(range(1, 101))] * 4


def test_streams_without_a_client_expire(models: Path) -> None:
    with serving(models, f"--resumable-grace-secs={GRACE_SECS}") as server:
        tokens = []
        for _ in range(5):
            with Connection(server.ports["http"]) as connection:
                tokens.append(asked(connection, LONG))
        server.wait_metric(IN_FLIGHT, "repeat", 0)
        found = server.metrics()
        assert (found["gateway_expired_total"], found["gateway_recorded_bytes"]) == (5, 0)
        assert found["gateway_recordings"] == 0
        with httpx.Client(base_url=server.http) as http:
            answer = http.get(PATH, headers={"Last-Event-ID": f"{tokens[0]}.1"})
        assert answer.status_code == 404
        assert "it has expired" in answer.json()["error"]


def test_an_unread_stream_takes_no_more_than_its_buffer(models: Path) -> None:
    size, flood = 50_000, {"text_input": "x" * 1_000, "n": 100_000}
    with serving(models, f"--resumable-buffer-size={size}") as server:
        with Connection(server.ports["http"], receive_buffer=4096) as connection:
            token = asked(connection, flood)
            connection.reset()
        wait_until(lambda: server.metrics()["gateway_recorded_bytes"] > size, "it is full")
        # One response beyond the limit, and what the stream held.
        assert server.metrics()["gateway_recorded_bytes"] < size + 65 * 2_000
        assert server.metric(IN_FLIGHT, "repeat") == 1
        with httpx.Client(base_url=server.http) as http:
            refused = http.get(PATH, headers={"Last-Event-ID": f"{token}.0"})
        assert refused.status_code == 404
        oldest = re.findall(r"response 1 .* no longer kept, the oldest is (\d+)", refused.text)
        number = int(oldest[0])
        with Connection(server.ports["http"]) as connection:
            connection.send(get(PATH, f"Last-Event-ID: {token}.{number - 1}"))
            assert connection.head().status == 200
            assert numbers(take(connection, 1_000)) == list(range(number, number + 1_000))


def test_two_requests_with_one_key_are_one(server: Serving, repository: Path) -> None:
    key = {"Idempotency-Key": "two at once"}
    before = server.metrics()
    with (
        httpx.Client(base_url=server.http, timeout=WAIT_SECS) as http,
        ThreadPoolExecutor() as pool,
    ):
        body = {"INPUT": "x"}
        with held(repository, "holding"):
            posts = [
                pool.submit(http.post, "/v2/models/holding/generate", json=body, headers=key)
                for _ in range(4)
            ]
            joined = before["gateway_joined_total"] + 3
            wait_until(
                lambda: server.metrics()["gateway_joined_total"] == joined, "three have joined"
            )
        found = [each.result(WAIT_SECS) for each in posts]
        late = http.post("/v2/models/holding/generate", json=body, headers=key)
        other = http.post("/v2/models/holding/generate", json={"INPUT": "y"}, headers=key)
    assert {(each.status_code, each.content) for each in (*found, late)} == {
        (200, b'{"OUTPUT":"x","model_name":"holding","model_version":"1"}')
    }
    replayed = sorted(each.headers.get("Idempotency-Replayed", "") for each in found)
    assert replayed == ["", "true", "true", "true"]
    assert other.status_code == 422
    name = 'nv_inference_request_success{model="holding",version="1"}'
    assert server.metrics()[name] == before[name] + 1
    assert server.metrics()["gateway_joined_total"] == before["gateway_joined_total"] + 4


# ModelStreamInfer.


def question(request_id: str = "", model: str = "repeat", **parameters: Any) -> Any:
    """A message; parameters as in the protocol."""
    inputs = {"INPUT": "x"} if model == "single" else ASK
    request = infer_request(model, request_id, **inputs)
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


def long(request_id: str, *, n: int = LONG["n"], **parameters: Any) -> Any:
    """A message whose answer takes its time."""
    request = question(request_id, **parameters)
    request.inputs[1].contents.int_contents[:] = [n]
    request.inputs[2].contents.int_contents[:] = [LONG["delay_us"]]
    return request


def told(message: Any) -> tuple[str, int, str]:
    """Id, number and token of an answer."""
    assert message.error_message == ""
    parameters = message.infer_response.parameters
    token = parameters["sluice_stream"].string_param if "sluice_stream" in parameters else ""
    return message.infer_response.id, parameters["sluice_event"].int64_param, token


@pytest.mark.parametrize("got", range(1, COUNT + 1))
def test_an_rpc_that_breaks_anywhere_costs_nothing(server: Serving, got: int) -> None:
    with connected(server.grpc) as stub:
        with streaming(stub) as rpc:
            rpc.ask(question("a", resumable=True))
            before = [told(rpc.answer()) for _ in range(got)]
        token = before[0][2]
        assert len(token) == (32 + NAME_CHARS if FLEET else 32)
        with streaming(stub) as rpc:
            more = {"resume": token, "resume_after": got}
            rpc.ask(question("b", triton_enable_empty_final_response=True, **more))
            *after, last = rpc.rest()
    if got < COUNT:
        after, last = [*after, last], last
    found = [told(message) for message in after]
    assert before == [("a", number, token if number == 1 else "") for number in range(1, got + 1)]
    assert found == [
        ("b", number, token if number == got + 1 else "") for number in range(got + 1, COUNT + 1)
    ]
    assert last.infer_response.parameters["triton_final_response"].bool_param


def test_streams_that_did_not_ask_have_no_marks_and_stop(server: Serving) -> None:
    with connected(server.grpc) as stub, streaming(stub) as rpc:
        rpc.ask(question("a"))
        assert set(rpc.answer().infer_response.parameters) == {"triton_final_response"}


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"resume": "x" * 32}, "there is no such stream"),
        ({"resume": "x" * 32, "resume_after": -1}, "'resume_after' is -1, expected 0 or more"),
        ({"resume": True}, "invalid value type for 'resume' parameter, expected string_param"),
        ({"resume": "x", "resume_after": "1"}, "invalid value type for 'resume_after'"),
        ({"resumable": "yes"}, "parameter 'resumable' is 'yes', expected true or false"),
        ({"resumable": True, "model": "single"}, "model 'single' is not decoupled"),
        ({"resume": "x" * 32, "model": "single"}, "there is no such stream"),
    ],
)
def test_a_wrong_message_is_refused_and_the_stream_continues(
    server: Serving, parameters: dict[str, Any], error: str
) -> None:
    with connected(server.grpc) as stub, streaming(stub) as rpc:
        rpc.ask(question("wrong", **parameters))
        found = rpc.answer()
        assert error in found.error_message
        assert found.infer_response.id == "wrong"
        rpc.ask(question("right", resumable=True))
        assert told(rpc.answer())[:2] == ("right", 1)


def test_a_recorded_request_is_cancelled_as_any_other(server: Serving) -> None:
    with connected(server.grpc) as stub, streaming(stub) as rpc, streaming(stub) as other:
        asked = long("a", resumable=True)
        for each in (rpc, other):
            each.ask(asked)
            told(each.answer())
        rpc.ask(question("a", cancel=True))
        *before, last = rpc.rest()
        assert last.infer_response.parameters["cancelled"].bool_param
        assert last.infer_response.parameters["triton_final_response"].bool_param
        assert told(last)[1] == len(before) + 2
        told(other.answer())
        other.ask(question("a", cancel=True))
        assert other.rest()[-1].infer_response.parameters["cancelled"].bool_param


def test_a_resumed_stream_is_cancelled_by_its_new_id(server: Serving) -> None:
    with connected(server.grpc) as stub, streaming(stub) as others:
        others.ask(long("b"))
        others.answer()
        with streaming(stub) as rpc:
            rpc.ask(long("a", resumable=True))
            token = told(rpc.answer())[2]
        with streaming(stub) as rpc:
            rpc.ask(question("b", resume=token, resume_after=1))
            assert told(rpc.answer())[:2] == ("b", 2)
            rpc.ask(question("b", cancel=True))
            assert rpc.rest()[-1].infer_response.parameters["cancelled"].bool_param
        with streaming(stub) as rpc:
            rpc.ask(question("c", resume=token, triton_enable_empty_final_response=True))
            while not rpc.answer().infer_response.parameters["triton_final_response"].bool_param:
                pass
            rpc.ask(question("c", cancel=True))
            assert "runs no request with the id 'c'" in rpc.answer().error_message
        assert others.answer().error_message == ""


@pytest.mark.own_models("loads and unloads")
def test_a_stream_is_resumed_while_its_model_is_being_unloaded(models: Path) -> None:
    with serving(models, *EXPLICIT) as server, connected(server.grpc) as stub:
        with streaming(stub) as rpc:
            rpc.ask(long("a", n=50, resumable=True))
            token = told(rpc.answer())[2]
        stub.RepositoryModelUnload(service_pb2.RepositoryModelUnloadRequest(model_name="repeat"))
        with streaming(stub) as rpc:
            rpc.ask(question("a", resume=token, resume_after=1))
            found = [told(answer)[1] for answer in rpc.rest()]
        assert found == list(range(2, 51))


def test_a_stream_is_only_for_its_own_model_and_wire(server: Serving) -> None:
    with connected(server.grpc) as stub, streaming(stub) as rpc:
        rpc.ask(question("a", resumable=True))
        token = told(rpc.answer())[2]
        versioned = question("b", resume=token)
        versioned.model_version = "1"
        for wrong in (question("b", "three", resume=token), versioned):
            with streaming(stub) as other:
                other.ask(wrong)
                assert "there is no such stream" in other.answer().error_message
    with httpx.Client(base_url=server.http) as http:
        assert http.get(PATH, headers={"Last-Event-ID": f"{token}.0"}).status_code == 404


async def test_the_official_client_resumes_a_stream(server: Serving) -> None:
    inputs = [_input("text_input", "BYTES", np.array(["x"], dtype=object))]
    inputs += [_input(name, "INT32", np.array([ASK[name]], np.int32)) for name in ("n", "delay_us")]

    async def ask(count: int, **parameters: Any) -> Sequence[tuple[int, str]]:
        async def requests() -> Any:
            yield {"model_name": "repeat", "inputs": inputs, "parameters": parameters}

        async with tritonclient.grpc.aio.InferenceServerClient(server.grpc) as client:
            answers = client.stream_infer(requests())
            found = []
            async for result, error in answers:
                assert error is None
                found.append(told_by(result))
                if len(found) == count:
                    answers.cancel()
                    break
            return found

    async with asyncio.timeout(WAIT_SECS):
        before = await ask(2, resumable=True)
        token = before[0][1]
        after = await ask(COUNT - 2, resume=token, resume_after=2)
    assert [number for number, _ in (*before, *after)] == list(range(1, COUNT + 1))


def told_by(result: Any) -> tuple[int, str]:
    parameters = result.get_response().parameters
    return parameters["sluice_event"].int64_param, parameters["sluice_stream"].string_param


def _input(name: str, datatype: str, values: Any) -> Any:
    found = tritonclient.grpc.InferInput(name, list(values.shape), datatype)
    found.set_data_from_numpy(values)
    return found


# The end of the server.


def test_shutdown_serves_connected_readers_and_waits_for_no_disconnected_client(
    models: Path,
) -> None:
    with serving(models) as server:
        with Connection(server.ports["http"]) as gone, accepted(server, "repeat"):
            asked(gone, LONG)
        server.wait_metric(IN_FLIGHT, "repeat", 1)
        with Connection(server.ports["http"]) as connection:
            connection.ask(PATH, {**ASK, "n": 20, "delay_us": 50_000, "resumable": True})
            head = connection.head()
            assert head.status == 200
            server.begin_stop()
            body = connection.rest()
            assert numbers(body) == list(range(1, 21))
        assert server.wait_ended(WAIT_SECS) == 0
    assert "Traceback" not in server.text
