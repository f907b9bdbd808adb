"""Deadlines as clients of each wire name them, and as they read their ends."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from gateway.in_process.server import Server
from tests.conformance.models import NEVER_US, REPEAT, identity
from tests.conformance.openai_models import contract, piece
from tests.raw import Connection, post
from tests.rpc import connected, infer_request, streaming
from tests.scripted import installed
from tests.serving import WAIT_SECS, wait_until, write_model

SHORT_MS = 60
TIMEOUT = {"x-request-timeout-ms": str(SHORT_MS)}
LONG_MS = 1000
"""Time enough for a first response on a machine with other work."""
LONG = {"x-request-timeout-ms": str(LONG_MS)}
PAST = {"x-request-deadline": "1999-12-31T23:59:59Z"}
EXCEEDED = "deadline exceeded after 0 tokens"
INPUT = {"name": "INPUT", "datatype": "FP32", "shape": [1], "data": [1.0]}
LATE = {"text_input": "x", "n": 1, "delay_us": NEVER_US}
QUICK = {"text_input": "x", "n": 10, "delay_us": 120_000}
"""Ten responses in 1200 ms."""
CHAT = {"model": "late", "messages": [{"role": "user", "content": "hi"}]}
REQUESTS: dict[str, tuple[str, Any]] = {
    "infer": ("/v2/models/slow/infer", {"inputs": [INPUT]}),
    "generate": ("/v2/models/repeat/generate", LATE),
    "generate_stream": ("/v2/models/repeat/generate_stream", LATE),
    "chat": ("/v1/chat/completions", CHAT),
    "chat_stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
}
EVERY = pytest.mark.parametrize("kind", REQUESTS)


class Served:
    """A server with models that are slow, and its clients."""

    def __init__(self, server: Server, client: httpx.Client) -> None:
        self.server = server
        self.grpc = f"127.0.0.1:{server.ports['grpc']}"
        self._client = client

    def post(self, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
        url = f"http://127.0.0.1:{self.server.ports['http']}{path}"
        return self._client.post(url, json=body, headers=headers)

    def ended(self) -> bool:
        """Whether no request is in flight."""
        lines = self.server.metrics().splitlines()
        found = [each for each in lines if each.startswith("gateway_requests_in_flight{")]
        return len(found) == 4 and all(each.endswith(" 0") for each in found)


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("deadlines")
    installed(folder / "installed")
    models = folder / "models"
    write_model(models, "repeat", REPEAT)
    write_model(models, "slow", identity("FP32", delay_us=NEVER_US))
    write_model(models, "echo", identity("FP32"))
    write_model(models, "late", contract({"pause": 600}, piece("a"), {"final": True}))
    ports = {"http_port": 0, "grpc_port": 0}
    addresses = {"http_address": "127.0.0.1", "grpc_address": "127.0.0.1"}
    transport = {"grpc_transport": request.param}
    with pytest.MonkeyPatch.context() as patch, httpx.Client(timeout=WAIT_SECS) as client:
        patch.syspath_prepend(str(folder / "installed"))
        with Server(model_repository=models, **transport, **ports, **addresses) as found:
            started = Served(found, client)
            yield started
            wait_until(started.ended, "every request has ended")


OVER_HTTP = pytest.mark.parametrize("served", ["hyper"], indirect=True)
OVER_GRPC = pytest.mark.parametrize("served", ["hyper", "grpcio"], indirect=True)


def message_of(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    if isinstance(error, str):
        return error
    assert (error["type"], error["code"]) == ("server_error", "deadline_exceeded")
    found: str = error["message"]
    return found


@OVER_HTTP
@EVERY
def test_a_request_without_a_response_in_time_is_504(served: Served, kind: str) -> None:
    answer = served.post(*REQUESTS[kind], TIMEOUT)
    assert (answer.status_code, message_of(answer)) == (504, EXCEEDED)
    assert answer.headers["x-refused-reason"] == "deadline_exceeded"


@OVER_HTTP
@EVERY
def test_a_deadline_in_the_past_is_504_and_a_retry_does_not_help(served: Served, kind: str) -> None:
    answer = served.post(*REQUESTS[kind], PAST)
    assert (answer.status_code, message_of(answer)) == (504, EXCEEDED)
    assert answer.headers["x-should-retry"] == "false"


@OVER_HTTP
@EVERY
def test_a_malformed_deadline_is_400(served: Served, kind: str) -> None:
    answer = served.post(*REQUESTS[kind], {"x-request-timeout-ms": "-5"})
    assert answer.status_code == 400
    assert "header 'x-request-timeout-ms' is '-5', expected a number" in answer.text


@OVER_HTTP
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-stainless-read-timeout", "600"),
        ("x-stainless-read-timeout", "junk"),
        ("x-request-deadline", "9999-12-31T23:59:59Z"),
        ("x-request-timeout-ms", "0"),
        ("x-slo-ttft-ms", "0.001"),
    ],
)
def test_these_headers_refuse_nothing(served: Served, name: str, value: str) -> None:
    path = "/v2/models/echo/infer"
    for _ in range(2):  # the second with the remembered head
        assert served.post(path, {"inputs": [INPUT]}, {name: value}).status_code == 200


@OVER_HTTP
def test_a_remembered_head_and_body_have_a_deadline_each_time(served: Served) -> None:
    body = json.dumps({"inputs": [INPUT]}).encode()
    headers, longer = (f"{name}: {value}" for name, value in (*TIMEOUT.items(), *LONG.items()))
    with Connection(served.server.ports["http"]) as connection:
        for _ in range(3):
            connection.send(post("/v2/models/slow/infer", body, headers))
            answer = connection.answer()
            assert (answer.status, answer.json) == (504, {"error": EXCEEDED})
            connection.send(post("/v2/models/echo/infer", body, longer))
            assert connection.answer().status == 200


@OVER_HTTP
def test_a_stream_in_time_with_its_first_response_continues(served: Served) -> None:
    answer = served.post("/v2/models/repeat/generate_stream", QUICK, LONG)
    assert answer.text.count("data: ") == 10
    assert EXCEEDED not in answer.text


@OVER_HTTP
def test_a_stream_ends_with_an_event_at_the_deadline_of_its_answer(served: Served) -> None:
    body = {**QUICK, "n": 10**6, "deadline_ms": LONG_MS}
    answer = served.post("/v2/models/repeat/generate_stream", body, {})
    assert answer.status_code == 200
    events = answer.text.strip().split("\n\n")
    assert len(events) > 1
    assert events[-1] == f'data: {{"error":"{EXCEEDED}"}}'


@OVER_HTTP
def test_a_parameter_of_an_infer_is_a_deadline(served: Served) -> None:
    body = {"inputs": [INPUT], "parameters": {"deadline_ms": SHORT_MS}}
    for _ in range(2):
        answer = served.post("/v2/models/slow/infer", body, {})
        assert (answer.status_code, message_of(answer)) == (504, EXCEEDED)
    body["parameters"]["deadline_ms"] = "soon"  # type: ignore[index]
    answer = served.post("/v2/models/slow/infer", body, {})
    assert answer.status_code == 400
    assert "parameter 'deadline_ms' is 'soon', expected a number" in answer.text


@pytest.fixture
def stub(served: Served) -> Iterator[Any]:
    with connected(served.grpc, ready=True) as found:
        yield found


def floats(model: str) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="INPUT", datatype="FP32", shape=[1])
    request.raw_input_contents.append(np.ones(1, np.float32).tobytes())
    return request


def status(call: Any, *given: Any, **more: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*given, timeout=WAIT_SECS, **more)
    return caught.value.code().name, caught.value.details()


@OVER_GRPC
def test_metadata_bound_an_rpc(served: Served, stub: Any) -> None:
    for _ in range(3):  # then the message is remembered
        found = status(stub.ModelInfer, floats("slow"), metadata=[*TIMEOUT.items()])
        assert found == ("DEADLINE_EXCEEDED", EXCEEDED)
        found = status(stub.ModelInfer, floats("slow"), metadata=[*PAST.items()])
        assert found == ("DEADLINE_EXCEEDED", EXCEEDED)
        assert stub.ModelInfer(floats("echo"), metadata=[*LONG.items()]).raw_output_contents
    code, text = status(stub.ModelInfer, floats("slow"), metadata=[("x-request-timeout-ms", "x")])
    assert code == "INVALID_ARGUMENT"
    assert "header 'x-request-timeout-ms' is 'x'" in text


@OVER_GRPC
def test_remembered_metadata_bound_each_rpc(served: Served, stub: Any) -> None:
    for _ in range(3):  # without `grpc-timeout`, so that the headers may be remembered
        call = stub.ModelInfer.future(floats("slow"), metadata=[*TIMEOUT.items()])
        with pytest.raises(grpc.RpcError) as caught:
            call.result(WAIT_SECS)
        assert caught.value.details() == EXCEEDED


@OVER_GRPC
def test_a_parameter_bounds_a_message(served: Served, stub: Any) -> None:
    request = floats("slow")
    request.parameters["deadline_ms"].int64_param = SHORT_MS
    for _ in range(3):
        assert status(stub.ModelInfer, request) == ("DEADLINE_EXCEEDED", EXCEEDED)
    request.parameters["deadline_ms"].string_param = "soon"
    assert status(stub.ModelInfer, request)[0] == "INVALID_ARGUMENT"


@OVER_GRPC
def test_a_deadline_of_a_streams_request_ends_this_one_alone(served: Served, stub: Any) -> None:
    late = infer_request("repeat", "late", **LATE)
    late.parameters["deadline_ms"].double_param = SHORT_MS
    with streaming(stub) as rpc:
        rpc.ask(late)
        answer = rpc.answer()
        assert (answer.infer_response.id, answer.error_message) == ("late", EXCEEDED)
        reason = answer.infer_response.parameters["refused_reason"].string_param
        assert reason == "deadline_exceeded"
        rpc.ask(infer_request("repeat", "next", text_input="x", n=1))
        assert rpc.answer().infer_response.id == "next"


@OVER_GRPC
def test_metadata_of_a_stream_bound_the_first_response_of_each_request(
    served: Served, stub: Any
) -> None:
    with streaming(stub, metadata=[*LONG.items()]) as rpc:
        rpc.ask(infer_request("repeat", "1", **QUICK), infer_request("repeat", "2", **LATE))
        found = [*rpc.rest()]
    assert [each.error_message for each in found if each.infer_response.id == "2"] == [EXCEEDED]
    answers = [each for each in found if each.infer_response.id == "1"]
    assert len(answers) == 10
    assert not any(each.error_message for each in answers)
