"""OpenAI's endpoints over a real data plane: inputs of the model, and answers."""

from dataclasses import replace

import httpx
import orjson
import pytest

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.app import build_app
from gateway.frontends.http.openai.routes import paths_of
from gateway.messages import InferRequest
from gateway.models.model import Model
from gateway.openai_contract import ENDPOINT, REQUEST, Endpoint, OpenAiRefusal
from gateway.stream import INTERRUPTED
from gateway.tensor import Datatype
from tests.builders import FLAG, Execution, LoadedModels, ScriptedInstance, settle, soon
from tests.conftest import Serve
from tests.exchange import Exchange
from tests.gateway.frontends.http.conftest import Open
from tests.gateway.frontends.http.openai.conftest import (
    ASK,
    CHAT,
    CHAT_ONLY,
    SETTINGS,
    answer,
    app_of,
    body,
    chunk,
    dataplane_of,
)


def given(execution: Execution) -> InferRequest:
    (request,) = execution.requests
    return request


def text_in(request: InferRequest, name: str) -> str:
    tensor = request.input(name)
    assert tensor is not None
    assert tensor.datatype is Datatype.BYTES
    (element,) = tensor.elements()
    return element.decode()


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_a_body_goes_to_the_model_and_its_answer_back_untouched(
    serve: Serve, instance: ScriptedInstance, endpoint: Endpoint
) -> None:
    app = app_of(serve(instance, config=CHAT))
    for path in paths_of(endpoint):
        async with Exchange(app, path, ASK) as exchange:
            execution = await instance.begun()
            request = given(execution)
            assert text_in(request, REQUEST).encode() == ASK
            assert text_in(request, ENDPOINT) == endpoint
            execution.answer(chunk('{"b" :1,  "a":2}', final=True))
            execution.end()
            status, headers = await exchange.start()
            assert (status, headers["content-type"]) == (200, "application/json")
            assert await exchange.rest() == b'{"b" :1,  "a":2}'


async def test_an_empty_final_response_may_follow_the_answer(
    serve: Serve, instance: ScriptedInstance
) -> None:
    async with Exchange(app_of(serve(instance, config=CHAT)), "/v1/completions", ASK) as exchange:
        execution = await instance.begun()
        execution.answer(chunk("{}"))
        execution.answer(FLAG)
        execution.end()
        assert (await exchange.start())[0] == 200
        assert await exchange.rest() == b"{}"


async def test_a_model_that_batches_gets_a_batch_of_one(
    serve: Serve, instance: ScriptedInstance
) -> None:
    config = replace(CHAT, max_batch_size=4)
    async with Exchange(app_of(serve(instance, config=config)), "/tokenize", ASK) as exchange:
        execution = await instance.begun()
        assert [each.shape for each in given(execution).inputs] == [(1, 1), (1, 1)]
        execution.answer(chunk("{}", final=True))
        execution.end()
        assert (await exchange.start())[0] == 200


async def test_a_model_of_one_endpoint_gets_no_endpoint(
    serve: Serve, instance: ScriptedInstance
) -> None:
    app = app_of(serve(instance, config=CHAT_ONLY))
    async with Exchange(app, "/v1/chat/completions", body(model="chat_only")) as exchange:
        execution = await instance.begun()
        assert [each.name for each in given(execution).inputs] == [REQUEST]
        execution.answer(chunk("{}", final=True))
        execution.end()
        assert (await exchange.start())[0] == 200


async def test_an_adapters_request_goes_to_its_model(
    serve: Serve, instance: ScriptedInstance
) -> None:
    config = replace(CHAT, parameters={"openai_names": '["formal"]'})
    asked = body(model="formal", messages=[])
    async with Exchange(app_of(serve(instance, config=config)), "/v1/responses", asked) as exchange:
        execution = await instance.begun()
        request = given(execution)
        assert (request.model, text_in(request, REQUEST).encode()) == ("chat", asked)
        execution.answer(chunk("{}", final=True))
        execution.end()
        assert (await exchange.start())[0] == 200


@pytest.mark.parametrize(
    ("content", "status", "kind", "param", "message"),
    [
        (b"", 400, "BadRequestError", None, "the body is empty"),
        (b"{", 400, "BadRequestError", None, "not valid JSON"),
        (b"[]", 400, "BadRequestError", None, "an object is expected"),
        (b'{"model":5}', 400, "BadRequestError", "model", "`model` is no text"),
        (b'{"model":"x"}', 404, "NotFoundError", "model", "The model `x` does not exist."),
        (b'{"stream":"yes"}', 400, "BadRequestError", "stream", "expected true or false"),
        (b"x" * 1001, 400, "BadRequestError", None, "exceeds the maximum allowed input size"),
    ],
)
async def test_a_refusal_is_openais_json(
    client: httpx.AsyncClient,
    content: bytes,
    status: int,
    kind: str,
    param: str | None,
    message: str,
) -> None:
    found = await answer(client, content)
    error = found.json()["error"]
    assert (found.status_code, error["code"]) == (status, status)
    assert (error["type"], error["param"]) == (kind, param)
    assert message in error["message"]
    assert found.headers["content-type"] == "application/json"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InferenceError(Code.INVALID_ARG, "no such role"), 400, "no such role"),
        (InferenceError(Code.UNAVAILABLE, "its engine has stopped"), 503, "its engine has stopped"),
        (
            OpenAiRefusal(Code.INVALID_ARG, "x", status=422, body=b'{"error":{"message":"own"}}'),
            422,
            "own",
        ),
        (
            RuntimeError("/secret/path"),
            500,
            "model 'chat' failed unexpectedly; the server's log says why",
        ),
    ],
)
async def test_an_error_in_place_of_the_first_chunk_decides_the_status(
    serve: Serve,
    instance: ScriptedInstance,
    stream: bool,
    error: Exception,
    status: int,
    message: str,
) -> None:
    app = app_of(serve(instance, config=CHAT))
    asked = body(model="chat", stream=stream)
    async with Exchange(app, "/v1/chat/completions", asked) as exchange:
        (await instance.begun()).crash(error)
        found, headers = await exchange.start()
        assert (found, headers["content-type"]) == (status, "application/json")
        assert headers.get("retry-after") == ("1" if status == 503 else None)
        assert orjson.loads(await exchange.rest())["error"]["message"] == message


async def test_a_model_that_says_nothing_has_made_a_mistake(
    serve: Serve, instance: ScriptedInstance
) -> None:
    app = app_of(serve(instance, config=CHAT))
    async with Exchange(app, "/v1/chat/completions", ASK) as exchange:
        execution = await instance.begun()
        execution.answer(FLAG)
        execution.end()
        assert (await exchange.start())[0] == 500


async def test_a_request_cancelled_by_its_id_is_closed(
    serve: Serve, instance: ScriptedInstance
) -> None:
    app = app_of(serve(instance, config=CHAT))
    async with Exchange(app, "/v1/chat/completions", ASK) as exchange:
        execution = await instance.begun()
        execution.answer(INTERRUPTED)
        execution.end()
        assert (await exchange.start())[0] == 499


async def test_a_full_model_asks_to_try_again(
    serve: Serve, connect: Open, instance: ScriptedInstance
) -> None:
    app = app_of(serve(instance, config=replace(CHAT, parameters={"max_in_flight": "1"})))
    async with Exchange(app, "/v1/chat/completions", ASK):
        await instance.begun()
        found = await answer(connect(app))
        assert (found.status_code, found.headers["retry-after"]) == (503, "1")
        assert found.headers["x-refused-reason"] == "overloaded"
        assert found.headers["x-should-retry"] == "true"
        assert found.json()["error"]["code"] == "server_overloaded"


async def test_an_exiting_server_refuses(
    serve: Serve, connect: Open, instance: ScriptedInstance
) -> None:
    dataplane = dataplane_of(serve(instance, config=CHAT))
    client = connect(build_app(dataplane, SETTINGS, "triton"))
    dataplane.refuse_requests()
    found = await answer(client)
    assert (found.status_code, found.json()["error"]["message"]) == (503, "Server exiting")


async def test_a_defect_of_the_server_is_not_shown_to_the_client(connect: Open) -> None:
    class Broken(LoadedModels):
        def find(self, name: str, version: str) -> Model:
            raise RuntimeError("/secret/path")

    app = build_app(DataPlane(Broken()), SETTINGS, "triton")  # type: ignore[arg-type]
    found = await answer(connect(app))
    assert (found.status_code, found.json()["error"]["type"]) == (500, "InternalServerError")
    assert "secret" not in found.text


# Paths and headers.


@pytest.mark.parametrize("path", ["/v1/nope", "/openai/v1/chat", "/v1/chat/completions/"])
async def test_a_path_that_is_not_there_is_not_found_in_openais_json(
    client: httpx.AsyncClient, path: str
) -> None:
    found = await answer(client, path=path)
    assert (found.status_code, found.json()["error"]["type"]) == (404, "NotFoundError")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/rerank", "/detokenize"])
async def test_only_post_is_allowed(client: httpx.AsyncClient, path: str) -> None:
    found = await soon(client.get(path))
    assert (found.status_code, found.json()["error"]["code"]) == (405, 405)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/nope", "/tokenize"])
async def test_every_response_to_a_failed_request_has_its_request_id(
    client: httpx.AsyncClient, path: str
) -> None:
    found = await soon(client.post(path, content=b"{", headers={"X-Request-Id": "mine"}))
    assert found.headers["x-request-id"] == "mine"


async def test_a_request_without_an_id_gets_one(client: httpx.AsyncClient) -> None:
    first, second = [(await answer(client, b"{")).headers["x-request-id"] for _ in range(2)]
    assert first
    assert second
    assert first != second


async def test_the_model_knows_the_request_by_the_id_that_the_client_sees(
    serve: Serve, instance: ScriptedInstance
) -> None:
    async with Exchange(app_of(serve(instance, config=CHAT)), "/v1/completions", ASK) as exchange:
        execution = await instance.begun()
        execution.answer(chunk("{}", final=True))
        execution.end()
        _, headers = await exchange.start()
        assert headers["x-request-id"] == given(execution).id


@pytest.mark.parametrize(
    ("header", "member", "expected"),
    [
        ("mine", "theirs", "mine"),
        ("mine", None, "mine"),
        (None, "theirs\r\n\u2028", "theirs\r\n\u2028"),
    ],
)
async def test_the_header_names_a_request_before_its_body_does(
    serve: Serve,
    instance: ScriptedInstance,
    header: str | None,
    member: str | None,
    expected: str,
) -> None:
    asked = body(model="chat", **({} if member is None else {"request_id": member}))
    headers = {} if header is None else {"x-request-id": header}
    app = app_of(serve(instance, config=CHAT))
    async with Exchange(app, "/v1/completions", asked, headers) as exchange:
        execution = await instance.begun()
        assert given(execution).id == expected
        execution.answer(chunk("{}", final=True))
        execution.end()
        _, told = await exchange.start()
    assert told["x-request-id"] == header or (header is None and len(told["x-request-id"]) == 32)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/tokenize"])
async def test_a_page_of_another_origin_cannot_ask_without_its_browser(
    client: httpx.AsyncClient, path: str
) -> None:
    headers = {"content-type": "text/plain", "origin": "http://elsewhere.example"}
    found = await soon(client.post(path, content=b'{"model":"chat"}', headers=headers))
    assert found.status_code == 415
    assert found.json()["error"] == {
        "message": "expected the content-type application/json from a page of another origin, "
        "found 'text/plain'; Origin 'http://elsewhere.example'",
        "type": "BadRequestError",
        "param": None,
        "code": 415,
    }


async def test_the_models_are_listed(client: httpx.AsyncClient) -> None:
    for prefix in ("/v1", "/openai/v1"):
        listed = (await soon(client.get(f"{prefix}/models"))).json()
        assert (listed["object"], [each["id"] for each in listed["data"]]) == ("list", ["chat"])
        one = (await soon(client.get(f"{prefix}/models/chat"))).json()
        assert one == listed["data"][0]


@pytest.mark.parametrize("name", ["nope", "org/nope", "chat/", " "])
async def test_a_model_that_is_not_there_is_not_found(client: httpx.AsyncClient, name: str) -> None:
    found = await soon(client.get(f"/v1/models/{name}"))
    assert found.status_code == 404
    assert found.json()["error"]["message"] == f"The model `{name}` does not exist."


async def test_a_model_that_has_died_says_why(serve: Serve, connect: Open) -> None:
    instance = ScriptedInstance()
    client = connect(app_of(serve(instance, config=CHAT)))
    instance.die("out of memory")
    await settle()
    found = await soon(client.get("/v1/models/chat"))
    assert found.status_code == 503
    assert "model 'chat' is unavailable: " in found.json()["error"]["message"]
    assert "out of memory" in found.json()["error"]["message"]


async def test_a_further_name_may_have_a_slash(
    serve: Serve, connect: Open, instance: ScriptedInstance
) -> None:
    config = replace(CHAT, parameters={"openai_names": '["org/rude"]'})
    client = connect(app_of(serve(instance, config=config)))
    for path in ("/v1/models/org/rude", "/v1/models/org%2Frude"):
        assert (await soon(client.get(path))).json()["parent"] == "chat"


async def test_the_page_of_the_routes_has_them_in_a_group(client: httpx.AsyncClient) -> None:
    paths = (await soon(client.get("/openapi.json"))).json()["paths"]
    grouped = {
        path
        for path, methods in paths.items()
        for method in methods.values()
        if method.get("tags") == ["OpenAI"]
    }
    first = {paths_of(endpoint)[0] for endpoint in Endpoint}
    models = {"/v1/models", "/v1/models/{model}"}
    assert grouped == {*first, *models, "/health", "/ping", "/version", "/load"}
