"""The infer route over a real data plane."""

import gzip
import json
import struct
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backends.identity import Behaviour, ExecutionGate, IdentityInstance
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.infer import InferRoute
from gateway.frontends.http.request_scope import JOINED_BYTES
from gateway.messages import InferResponse
from gateway.settings import HttpSettings
from gateway.tensor import text_tensor
from tests.builders import DECOUPLED, LoadedModels, ScriptedInstance, soon
from tests.conftest import Serve
from tests.exchange import Exchange

ECHO = ModelConfig(
    name="echo",
    input=(ModelInput(name="X", data_type=DataType.TYPE_FP32, dims=(-1,)),),
    output=(ModelOutput(name="Y", data_type=DataType.TYPE_FP32, dims=(-1,)),),
)
PATH = "/v2/models/echo/infer"
FLOATS = struct.pack("<2f", 1.5, 2.5)
ASK: dict[str, Any] = {
    "inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "data": [1.5, 2.5]}]
}
BODY = json.dumps(ASK).encode()
ANSWER = (
    '{"model_name":"echo","model_version":"1","outputs":[{"name":"Y","datatype":"FP32",'
    '"shape":[2],"data":[1.5,2.5]}]}'
)
SETTINGS = HttpSettings(max_input_size=1000)


async def elsewhere(scope: Scope, receive: Receive, send: Send) -> None:
    """The application behind the route."""
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": b"elsewhere"})


def echo(**behaviour: Any) -> IdentityInstance:
    return IdentityInstance(Behaviour(**behaviour), {"X": "Y"})


def route_to(*models: Any, settings: HttpSettings = SETTINGS) -> ASGIApp:
    dataplane = DataPlane(LoadedModels(*models))  # type: ignore[arg-type]
    return InferRoute(dataplane, settings, elsewhere)


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    plain = {"accept-encoding": "identity"}
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers=plain, timeout=5)


@pytest.fixture
async def client(serve: Serve) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with the model `echo`, and another that has many responses."""
    llm = replace(ECHO, name="llm", model_transaction_policy=DECOUPLED)
    app = route_to(serve(echo(), config=ECHO), serve(echo(), config=llm))
    async with client_of(app) as found:
        yield found


def error_of(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json()["error"]


PAGES = [
    ("text/plain", "https://app.example", 415),
    ("", "https://app.example", 415),
    ("text/plain", "null", 415),
    ("application/json", "https://app.example", 200),
    ("application/octet-stream", "null", 200),
    ("text/plain", "http://test", 200),
    ("text/plain", None, 200),
    ("", None, 200),
]


@pytest.mark.parametrize(("kind", "origin", "status"), PAGES)
async def test_a_page_of_another_origin_sends_json_or_binary_tensors(
    client: httpx.AsyncClient, kind: str, origin: str | None, status: int
) -> None:
    headers = {"content-type": kind} if kind else {}
    if origin is not None:
        headers["origin"] = origin
    answer = await soon(client.post(PATH, content=BODY, headers=headers))
    assert answer.status_code == status
    if status == 415:
        expected = "expected the content-type application/json or application/octet-stream"
        assert error_of(answer)[1].startswith(expected)
        # The model is not looked up.
        other = await soon(client.post("/v2/models/no/infer", content=BODY, headers=headers))
        assert other.status_code == 415


# Which requests are its own.


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v2/models/echo/infer/",
        "/v2/models/echo/generate",
        "/v2/models/a/b/infer",
        "/v2/models//infer",
        "/v2/models/echo/versions//infer",
        "/v2/models/echo/versions/infer",
        "/v2/models/infer",
        "/x/v2/models/echo/infer",
        "/V2/models/echo/infer",
    ],
)
async def test_other_requests_go_elsewhere(client: httpx.AsyncClient, path: str) -> None:
    assert (await soon(client.post(path, content=BODY))).text == "elsewhere"


async def test_a_scope_other_than_http_goes_to_the_application() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def receive() -> Message:
        raise AssertionError("nothing to receive")

    async def send(message: Message) -> None:
        raise AssertionError("nothing to send")

    route = InferRoute(DataPlane(LoadedModels()), SETTINGS, app)  # type: ignore[arg-type]
    await soon(route({"type": "lifespan"}, receive, send))
    assert seen == ["lifespan"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_only_post_infers(client: httpx.AsyncClient, method: str) -> None:
    answer = await soon(client.request(method, PATH))
    assert error_of(answer) == (405, "Method Not Allowed")


@pytest.mark.parametrize("version", ["abc", "1.0", "-1", "٣", "1 "])
async def test_a_version_is_a_number(client: httpx.AsyncClient, version: str) -> None:
    for method in ("POST", "GET"):
        path = f"/v2/models/echo/versions/{version}/infer"
        assert error_of(await soon(client.request(method, path))) == (404, "Not Found")


@pytest.mark.parametrize("path", [PATH, "/v2/models/echo/versions/1/infer", f"{PATH}?x=/y"])
async def test_a_request_is_answered(client: httpx.AsyncClient, path: str) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/octet-stream"):
        answer = await soon(client.post(path, content=BODY, headers={"content-type": kind}))
        assert (answer.status_code, answer.text) == (200, ANSWER)
        assert dict(answer.headers) == {
            "content-type": "application/json",
            "content-length": str(len(ANSWER)),
        }


# What is refused, and in which order.


async def test_the_model_is_looked_up_before_anything_is_read(client: httpx.AsyncClient) -> None:
    headers = {"content-encoding": "br", "inference-header-content-length": "abc"}
    missing = await soon(client.post("/v2/models/nope/infer", content=b"{", headers=headers))
    assert error_of(missing) == (404, "Request for unknown model: 'nope' is not found")
    decoupled = await soon(client.post("/v2/models/llm/infer", content=b"{", headers=headers))
    assert error_of(decoupled) == (
        501,
        "HTTP end point doesn't support models with decoupled transaction policy",
    )
    encoded = await soon(client.post(PATH, content=b"{", headers=headers))
    assert error_of(encoded) == (501, "Unsupported compression type")
    assert encoded.headers["accept-encoding"] == "gzip, deflate"
    del headers["content-encoding"]
    length = await soon(client.post(PATH, content=b"{", headers=headers))
    assert error_of(length) == (
        400,
        "Unable to parse Inference-Header-Content-Length, got: abc",
    )
    assert (await soon(client.post(PATH, content=b"{"))).status_code == 500


async def test_a_refusal_has_the_status_of_its_code(client: httpx.AsyncClient) -> None:
    answer = await soon(client.post(PATH, content=b'{"inputs":[]}'))
    assert error_of(answer) == (
        400,
        "[request id: <id_unknown>] expected 1 inputs but got 0 inputs for model 'echo'. Got "
        "input(s) [], but missing required input(s) ['X']. Please provide all required input(s).",
    )


@pytest.mark.parametrize(
    ("failure", "status"),
    [(InferenceError(Code.UNAVAILABLE, "later"), 503), (InferenceError(Code.UNKNOWN, "no"), 400)],
)
async def test_a_model_that_fails_has_its_own_status(
    serve: Serve, failure: InferenceError, status: int
) -> None:
    instance = ScriptedInstance()
    async with Exchange(route_to(serve(instance, config=ECHO)), PATH, BODY) as exchange:
        execution = await instance.begun()
        execution.answer(failure)
        execution.end()
        assert (await exchange.start())[0] == status
        assert json.loads(await exchange.rest()) == {"error": failure.message}


@pytest.mark.parametrize("count", [0, 2])
async def test_a_model_answers_exactly_once(serve: Serve, count: int) -> None:
    instance = ScriptedInstance()
    async with Exchange(route_to(serve(instance, config=ECHO)), PATH, BODY) as exchange:
        execution = await instance.begun()
        for _ in range(count):
            execution.answer(InferResponse(outputs=(text_tensor("Y", ["x"]),)))
        execution.end()
        assert (await exchange.start())[0] == 500
        error = json.loads(await exchange.rest())["error"]
    assert error == f"expected a single response, got {count}"


async def test_nothing_of_a_defect_reaches_the_client(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("secret")

    monkeypatch.setattr("gateway.frontends.http.infer_request.parse_request", fail)
    status, error = error_of(await soon(client.post(PATH, content=BODY)))
    assert status == 500
    assert "secret" not in error


# Binary data.


async def test_a_raw_request_is_answered_in_kind(client: httpx.AsyncClient) -> None:
    headers = {"inference-header-content-length": "0"}
    answer = await soon(client.post(PATH, content=FLOATS, headers=headers))
    length = int(answer.headers["inference-header-content-length"])
    assert answer.headers["content-type"] == "application/octet-stream"
    assert json.loads(answer.content[:length])["outputs"][0]["parameters"] == {
        "binary_data_size": 8
    }
    assert answer.content[length:] == FLOATS


async def test_nothing_at_all_stays_json(client: httpx.AsyncClient) -> None:
    answer = await soon(client.post(PATH))
    assert answer.headers["content-type"] == "application/json"
    assert "inference-header-content-length" not in answer.headers
    assert answer.json()["outputs"][0]["parameters"] == {"binary_data_size": 0}


@pytest.mark.parametrize("size", [JOINED_BYTES // 2, JOINED_BYTES, 10 * JOINED_BYTES])
async def test_large_data_is_sent_as_it_is(client: httpx.AsyncClient, size: int) -> None:
    data = bytes(range(256)) * (size // 256)
    found = {"name": "X", "datatype": "FP32", "shape": [size // 4]}
    found["parameters"] = {"binary_data_size": size}
    header = json.dumps({"inputs": [found], "parameters": {"binary_data_output": True}}).encode()
    headers = {"inference-header-content-length": str(len(header))}
    answer = await soon(client.post(PATH, content=header + data, headers=headers))
    length = int(answer.headers["inference-header-content-length"])
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert answer.content[length:] == data


# Compression.


@pytest.mark.parametrize("encoding", ["identity", "gzip", "deflate"])
async def test_requests_and_responses_may_be_compressed(
    client: httpx.AsyncClient, encoding: str
) -> None:
    compress = {"gzip": gzip.compress, "deflate": zlib.compress}.get(encoding, bytes)
    header = json.dumps({**ASK, "parameters": {"binary_data_output": True}}).encode()
    answer = await soon(
        client.post(
            PATH,
            content=compress(header),
            headers={
                "content-encoding": encoding,
                "accept-encoding": encoding,
                "inference-header-content-length": str(len(header)),
            },
        )
    )
    assert answer.headers.get("content-encoding", "identity") == encoding
    length = int(answer.headers["inference-header-content-length"])
    assert json.loads(answer.content[:length])["model_name"] == "echo"
    assert answer.content[length:] == FLOATS


async def test_an_error_is_never_compressed(client: httpx.AsyncClient) -> None:
    answer = await soon(client.post(PATH, content=b"{", headers={"accept-encoding": "gzip"}))
    assert "content-encoding" not in answer.headers
    assert error_of(answer)[0] == 500


# Headers for the model.


async def test_headers_are_forwarded_to_the_model(serve: Serve) -> None:
    instance = ScriptedInstance()
    settings = replace(SETTINGS, header_forward_pattern="^x-")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"x-tenant", b"a"), (b"accept", b"b")]
        route = route_to(serve(instance, config=ECHO), settings=settings)
        await route({**scope, "headers": headers}, receive, send)

    async with Exchange(app, PATH, BODY) as exchange:
        execution = await instance.begun()
        assert execution.requests[0].parameters == {"x-tenant": "a"}
        execution.answer(InferResponse(final=True, outputs=()))
        execution.end()
        await exchange.start()


# Clients that leave.


async def test_the_model_stops_when_the_client_disconnects(serve: Serve) -> None:
    instance = ScriptedInstance()
    exchange = Exchange(route_to(serve(instance, config=ECHO)), PATH, BODY)
    async with exchange:
        execution = await instance.begun()
        exchange.leave()
        await soon(execution.stopped.wait())
    await exchange.ended()


async def test_a_request_whose_client_has_disconnected_never_reaches_the_model(
    serve: Serve,
) -> None:
    gate = ExecutionGate()
    model = serve(echo(gate=gate), config=ECHO)
    app = route_to(model)
    async with Exchange(app, PATH, BODY) as first:
        await soon(gate.reached(1))
        second = Exchange(app, PATH, BODY)
        async with second:
            second.leave()
            await second.ended()
        gate.open()
        assert (await first.start())[0] == 200
    assert model.statistics.execution_count == 1
