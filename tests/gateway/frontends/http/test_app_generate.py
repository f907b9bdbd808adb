"""The HTTP application: generate, disconnects, health and metadata."""

from dataclasses import replace
from pathlib import Path

import httpx
import orjson
import pytest

from backends.repeat import RepeatBackend, RepeatInstance
from gateway.config import ModelConfig
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError, RefusedError
from gateway.frontends.http.app import build_app
from gateway.messages import InferResponse
from gateway.stream import DEFAULT_LIMIT
from gateway.tensor import Datatype, Tensor
from tests.builders import (
    DECOUPLED,
    FLAG,
    TEXT,
    LoadedModels,
    ScriptedInstance,
    settle,
    soon,
    text_response,
)
from tests.conftest import Serve, tasks_left
from tests.gateway.frontends.http.apps import ASK, SETTINGS, app_of, generate, identity
from tests.gateway.frontends.http.conftest import Open

REPEAT = RepeatBackend().complete(ModelConfig(name="repeat", backend="repeat"), Path())


LLM = replace(TEXT, name="llm", model_transaction_policy=DECOUPLED)


NOT_ONE = (
    '{"error":"generate expects model to produce exactly 1 response, use generate stream for '
    'model that generates various number of responses"}'
)


@pytest.fixture
async def text(serve: Serve, connect: Open) -> httpx.AsyncClient:
    """A client of a server with the model `text`, which echoes."""
    return connect(app_of(serve(identity())))


@pytest.fixture
async def repeat(serve: Serve, connect: Open) -> httpx.AsyncClient:
    """A client of a server with the model `repeat`, which answers `n` times."""
    return connect(app_of(serve(RepeatInstance(), config=REPEAT)))


# One answer.


async def test_generate_answers_with_one_object(text: httpx.AsyncClient) -> None:
    answer = await soon(text.post("/v2/models/text/generate", json={**ASK, "id": "r1", "k": 1}))
    assert answer.status_code == 200
    assert answer.text == '{"id":"r1","model_name":"text","model_version":"1","text_output":"hi"}'
    assert answer.headers["content-type"] == "application/json"


async def test_generate_takes_any_content_type(text: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    body = b'{"text_input":"hi"}'
    answer = await soon(text.post("/v2/models/text/generate", content=body, headers=headers))
    assert answer.json()["text_output"] == "hi"


async def test_a_version_may_be_named(text: httpx.AsyncClient) -> None:
    answer = await soon(text.post("/v2/models/text/versions/1/generate", json=ASK))
    assert answer.json()["model_version"] == "1"


async def test_generate_takes_one_response_of_a_decoupled_model(repeat: httpx.AsyncClient) -> None:
    answer = await soon(repeat.post("/v2/models/repeat/generate", json={**ASK, "n": 1}))
    assert (answer.status_code, answer.json()["text_output"]) == (200, "hi")


@pytest.mark.parametrize("count", [0, 2, 5])
async def test_any_other_number_of_responses_is_an_error_with_status_200(
    repeat: httpx.AsyncClient, count: int
) -> None:
    answer = await soon(repeat.post("/v2/models/repeat/generate", json={**ASK, "n": count}))
    assert (answer.status_code, answer.text) == (200, NOT_ONE)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InferenceError(Code.INVALID_ARG, "no such token"), 400, "no such token"),
        (InferenceError(Code.UNAVAILABLE, "its engine has stopped"), 503, "its engine has stopped"),
        (
            RuntimeError("/secret/path"),
            500,
            "model 'text' failed unexpectedly; the server's log says why",
        ),
    ],
)
@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
async def test_an_error_in_place_of_the_first_response_decides_the_status(
    serve: Serve, verb: str, error: Exception, status: int, message: str
) -> None:
    instance = ScriptedInstance()
    async with generate(app_of(serve(instance)), "text", verb) as exchange:
        (await instance.begun()).crash(error)
        found, headers = await exchange.start()
        body = await exchange.rest()
        if verb == "generate_stream":
            assert headers["content-type"] == "text/event-stream; charset=utf-8"
            assert body.endswith(b"\n\n")
            body = body.removeprefix(b"data: ")
        else:
            assert headers["content-type"] == "application/json"
        assert found == status
        assert orjson.loads(body) == {"error": message}


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
async def test_the_refusal_of_a_request_by_its_replica_is_a_json_error(
    serve: Serve, verb: str
) -> None:
    instance = ScriptedInstance()
    async with generate(app_of(serve(instance)), "text", verb) as exchange:
        (await instance.begun()).crash(RefusedError(Code.UNAVAILABLE, "its queue is full"))
        status, headers = await exchange.start()
        assert (status, headers["content-type"]) == (503, "application/json")
        assert headers["retry-after"] == "1"
        assert orjson.loads(await exchange.rest()) == {"error": "its queue is full"}


# Many answers.


async def test_every_response_is_an_event(repeat: httpx.AsyncClient) -> None:
    answer = await soon(repeat.post("/v2/models/repeat/generate_stream", json={**ASK, "n": 3}))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in answer.headers
    event = 'data: {"model_name":"repeat","model_version":"1","text_output":"hi"}\n\n'
    assert answer.text == event * 3


async def test_zero_responses_are_an_empty_body(repeat: httpx.AsyncClient) -> None:
    answer = await soon(repeat.post("/v2/models/repeat/generate_stream", json={**ASK, "n": 0}))
    assert (answer.status_code, answer.text) == (200, "")


async def test_a_model_that_is_not_decoupled_has_one_event(text: httpx.AsyncClient) -> None:
    answer = await soon(text.post("/v2/models/text/generate_stream", json={**ASK, "id": "r1"}))
    assert answer.text == (
        'data: {"id":"r1","model_name":"text","model_version":"1","text_output":"hi"}\n\n'
    )


async def test_the_headers_wait_for_the_first_response(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance, config=LLM)
    async with generate(app_of(model), "llm", "generate_stream") as exchange:
        execution = await instance.begun()
        assert not exchange.started
        execution.answer(text_response("one"))
        assert (await exchange.start())[0] == 200
        assert b'"one"' in await exchange.chunk()
        execution.answer(text_response("two"))
        assert b'"two"' in await exchange.chunk()
        execution.answer(FLAG)
        execution.end()
        assert await exchange.chunk() == b""


async def test_the_headers_wait_no_longer_than_the_limit(serve: Serve) -> None:
    instance = ScriptedInstance()
    settings = replace(SETTINGS, first_response_secs=0.01, keep_alive_secs=0.01)
    app = app_of(serve(instance, config=LLM), settings=settings)
    async with generate(app, "llm", "generate_stream") as exchange:
        execution = await instance.begun()
        assert (await exchange.start())[0] == 200
        assert await exchange.chunk() == b": keep-alive\n\n"
        execution.crash(InferenceError(Code.INTERNAL, "too late for a status"))
        assert b'data: {"error":"too late for a status"}\n\n' in await exchange.rest()


async def test_an_error_after_the_first_event_is_the_last_event(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance, config=LLM)
    async with generate(app_of(model), "llm", "generate_stream") as exchange:
        execution = await instance.begun()
        execution.answer(text_response("one"))
        assert (await exchange.start())[0] == 200
        assert b'"one"' in await exchange.chunk()
        execution.answer(InferenceError(Code.INTERNAL, "broken"))
        execution.end()
        assert await exchange.rest() == b'data: {"error":"broken"}\n\n'
    assert model.statistics.fail.count == 1


async def test_an_output_that_json_cannot_carry_is_an_error(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance)
    async with generate(app_of(model), "text", "generate") as exchange:
        execution = await instance.begun()
        half = Tensor("Y", Datatype.FP16, (1,), b"\0\0")
        execution.answer(InferResponse(outputs=(half,), final=True))
        execution.end()
        assert (await exchange.start())[0] == 400
        assert b"sending FP16 data via JSON is not supported" in await exchange.rest()


# Leaving.


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
async def test_a_disconnect_before_the_first_response_stops_the_model(
    serve: Serve, verb: str
) -> None:
    instance = ScriptedInstance()
    model = serve(instance, config=LLM)
    async with generate(app_of(model), "llm", verb) as exchange:
        execution = await instance.begun()
        exchange.leave()
        await soon(execution.stopped.wait())
        await exchange.ended()
    assert len(model.requests) == 0
    assert model.statistics.fail.count == 1


async def test_a_disconnect_in_mid_stream_stops_the_model(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance, config=LLM)
    async with generate(app_of(model), "llm", "generate_stream") as exchange:
        execution = await instance.begun()
        execution.answer(text_response("one"))
        await exchange.start()
        await exchange.chunk()
        exchange.leave()
        await soon(execution.stopped.wait())
        await exchange.ended()
    assert len(model.requests) == 0


async def test_a_request_dropped_in_the_queue_never_reaches_the_model(serve: Serve) -> None:
    instance = ScriptedInstance(concurrency=1)
    app = app_of(serve(instance, config=LLM))
    async with generate(app, "llm", "generate_stream"):
        await instance.begun()
        async with generate(app, "llm", "generate_stream", text_input="queued") as second:
            second.leave()
            await second.ended()
    assert instance.asked == ["hi"]


async def test_a_disconnect_does_not_disturb_other_requests(serve: Serve) -> None:
    instance = ScriptedInstance()
    app = app_of(serve(instance, config=LLM))
    async with generate(app, "llm", "generate_stream") as stays:
        execution = await instance.begun()
        async with generate(app, "llm", "generate_stream"):
            await instance.begun()
        execution.finish("still here")
        await stays.start()
        assert b'"still here"' in await stays.rest()


async def test_a_slow_client_holds_back_the_model(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance, config=LLM)
    async with generate(app_of(model), "llm", "generate_stream") as exchange:
        execution = await instance.begun()
        execution.answer(text_response("first"))
        await exchange.start()
        await exchange.chunk()
        exchange.reads.clear()
        total = 10 * DEFAULT_LIMIT
        for number in range(total):
            execution.answer(text_response(str(number), final=number == total - 1))
        execution.end()
        for _ in range(100):
            await settle()
        assert execution.taken <= 3 * DEFAULT_LIMIT, "one write, one batch, one full stream"
        exchange.reads.set()
        assert (await exchange.rest()).count(b"data: ") == total


# Management.


async def test_health_follows_the_server(serve: Serve, connect: Open) -> None:
    models = LoadedModels(serve(identity()))
    client = connect(build_app(DataPlane(models), SETTINGS, "triton"))  # type: ignore[arg-type]
    assert (await soon(client.get("/v2/health/live"))).status_code == 200
    ready = await soon(client.get("/v2/health/ready"))
    assert (ready.status_code, ready.content) == (200, b"")
    models.trouble = {"bad": "Internal: broken weights"}
    assert (await soon(client.get("/v2/health/ready"))).status_code == 400
    assert (await soon(client.get("/v2/health/live"))).status_code == 200


async def test_a_server_that_is_not_strict_is_ready_without_a_bad_model(
    serve: Serve, connect: Open
) -> None:
    models = LoadedModels(serve(identity()))
    models.trouble = {"bad": "Internal: broken weights"}
    dataplane = DataPlane(models, strict_readiness=False)  # type: ignore[arg-type]
    client = connect(build_app(dataplane, SETTINGS, "triton"))
    assert (await soon(client.get("/v2/health/ready"))).status_code == 200
    models.settled = False
    assert (await soon(client.get("/v2/health/ready"))).status_code == 400


async def test_the_server_returns_its_name_and_extensions(text: httpx.AsyncClient) -> None:
    found = (await soon(text.get("/v2"))).json()
    assert found["name"] == "triton"
    assert {"model_configuration", "statistics", "generate"} <= set(found["extensions"])


@pytest.mark.parametrize("path", ["/v2/models/text", "/v2/models/text/versions/1"])
async def test_metadata_of_a_model_has_its_tensors(text: httpx.AsyncClient, path: str) -> None:
    assert (await soon(text.get(path))).json() == {
        "name": "text",
        "versions": ["1"],
        "platform": "identity",
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1]}],
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1]}],
    }


async def test_the_config_of_a_model_is_returned(text: httpx.AsyncClient) -> None:
    found = (await soon(text.get("/v2/models/text/config"))).json()
    assert (found["name"], found["backend"]) == ("text", "identity")
    assert found["input"][0]["data_type"] == "TYPE_STRING"


async def test_a_model_is_ready_while_an_instance_lives(serve: Serve, connect: Open) -> None:
    instance = ScriptedInstance()
    gone: list[str] = []
    model = serve(
        instance,
        config=replace(TEXT, parameters={"restart_tries": "0"}),
        on_change=lambda: gone.append("changed"),
    )
    client = connect(app_of(model))
    assert (await soon(client.get("/v2/models/text/ready"))).status_code == 200
    instance.die("its engine has stopped")
    await soon(instance.closed.wait())
    assert gone
    answer = await soon(client.get("/v2/models/text/ready"))
    assert answer.status_code == 503
    assert answer.json()["error"].startswith(
        "model 'text' is unavailable: its engine has stopped; "
    )


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/v2/models/nope", 404, "Request for unknown model: 'nope' is not found"),
        ("/v2/models/nope/ready", 404, "Request for unknown model: 'nope' is not found"),
        ("/v2/models/nope/config", 404, "Request for unknown model: 'nope' is not found"),
        ("/v2/models/nope/stats", 400, "requested model 'nope' is not available"),
        (
            "/v2/models/text/versions/7/stats",
            400,
            "requested model version is not available for model 'text'",
        ),
    ],
)
async def test_an_unknown_model_is_refused(
    text: httpx.AsyncClient, path: str, status: int, message: str
) -> None:
    answer = await soon(text.get(path))
    assert (answer.status_code, answer.json()) == (status, {"error": message})


@pytest.mark.parametrize(
    "path", ["/v2/models/stats", "/v2/models/text/stats", "/v2/models/text/versions/1/stats"]
)
async def test_statistics_count_a_request_once(text: httpx.AsyncClient, path: str) -> None:
    await soon(text.post("/v2/models/text/generate", json=ASK))
    await soon(text.post("/v2/models/text/generate_stream", json=ASK))
    (row,) = (await soon(text.get(path))).json()["model_stats"]
    assert (row["name"], row["version"]) == ("text", "1")
    assert row["inference_stats"]["success"]["count"] == 2
    assert (row["inference_count"], row["execution_count"]) == (2, 2)


async def test_nothing_is_left_when_a_request_has_been_answered(text: httpx.AsyncClient) -> None:
    await settle()
    before = set(tasks_left())
    await soon(text.post("/v2/models/text/generate_stream", json=ASK))
    await soon(text.post("/v2/models/text/generate", json=ASK))
    assert set(tasks_left()) == before
