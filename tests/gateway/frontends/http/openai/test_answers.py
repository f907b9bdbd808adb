"""Parsed members of a request; requests with an idempotency key: joined, resumed, kept apart."""

import asyncio

import httpx
import orjson
import pytest

from gateway.openai_contract import RequestBody
from tests.builders import FLAG, ScriptedInstance, soon
from tests.conftest import Serve
from tests.gateway.frontends.http.conftest import Open
from tests.gateway.frontends.http.openai.conftest import CHAT, app_of, body, chunk

PATH = "/v1/chat/completions"
KEY = {"Idempotency-Key": "k1"}
WHOLE = body(model="chat")
STREAM = body(model="chat", stream=True)
DONE = "data: [DONE]\n\n"


@pytest.fixture
async def client(serve: Serve, instance: ScriptedInstance, connect: Open) -> httpx.AsyncClient:
    """A client of a server with the model `chat`."""
    return connect(app_of(serve(instance, config=CHAT)))


async def answered(
    client: httpx.AsyncClient, instance: ScriptedInstance, content: bytes, *texts: str
) -> httpx.Response:
    """The answer to a request with the key; the model says these texts."""
    asking = asyncio.ensure_future(client.post(PATH, content=content, headers=KEY))
    execution = await instance.begun()
    for text in texts:
        execution.answer(chunk(text))
    execution.answer(FLAG)
    execution.end()
    return await soon(asking)


@pytest.mark.parametrize("content", [WHOLE, STREAM])
@pytest.mark.parametrize("headers", [{}, KEY])
async def test_a_model_may_take_the_members_until_the_answer_begins(
    client: httpx.AsyncClient,
    instance: ScriptedInstance,
    content: bytes,
    headers: dict[str, str],
) -> None:
    for is_taken in (True, False):
        key = {name: f"{value}.{is_taken}" for name, value in headers.items()}
        asking = asyncio.ensure_future(client.post(PATH, content=content, headers=key))
        execution = await instance.begun()
        given, _ = execution.requests[0].inputs
        assert isinstance(given.data, RequestBody)
        if is_taken:
            assert given.data.take() == orjson.loads(content)
        execution.answer(chunk("{}", final=True))
        execution.end()
        assert (await soon(asking)).status_code == 200
        assert given.data.take() is None
        assert given.elements() == (content,)


async def test_the_same_request_once_more_gets_the_same_answer(
    client: httpx.AsyncClient, instance: ScriptedInstance
) -> None:
    first = await answered(client, instance, WHOLE, "{}")
    again = await soon(client.post(PATH, content=WHOLE, headers=KEY))
    assert (first.text, again.text) == ("{}", "{}")
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert len(instance.executions) == 1


async def test_another_request_with_that_key_is_refused(
    client: httpx.AsyncClient, instance: ScriptedInstance
) -> None:
    await answered(client, instance, WHOLE, "{}")
    found = await soon(client.post(PATH, content=STREAM, headers=KEY))
    assert (found.status_code, found.json()["error"]["type"]) == (422, "UnprocessableEntityError")


async def test_a_key_that_is_too_long_is_refused(client: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k" * 256}
    found = await soon(client.post(PATH, content=WHOLE, headers=headers))
    assert found.status_code == 400
    assert "256 characters, expected 1 to 255" in found.json()["error"]["message"]


async def test_a_stream_can_be_resumed_behind_every_event(
    client: httpx.AsyncClient, instance: ScriptedInstance
) -> None:
    whole = await answered(client, instance, STREAM, "{1}", "{2}", "{3}")
    token = whole.headers["sluice-stream"]
    events = [f"id: {token}.{number}\ndata: {{{number}}}\n\n" for number in (1, 2, 3)]
    assert whole.text == "".join(events) + DONE
    for number in range(4):
        headers = {"Last-Event-ID": f"{token}.{number}"}
        rest = await soon(client.post(PATH, headers=headers))
        assert rest.text == "".join(events[number:]) + DONE
    assert len(instance.executions) == 1


@pytest.mark.parametrize(
    ("path", "last"), [(PATH, "made-up.1"), (PATH, "x"), ("/v1/completions", None)]
)
async def test_a_stream_of_another_path_cannot_be_resumed(
    client: httpx.AsyncClient, instance: ScriptedInstance, path: str, last: str | None
) -> None:
    whole = await answered(client, instance, STREAM, "{1}")
    headers = {"Last-Event-ID": last or f"{whole.headers['sluice-stream']}.1"}
    found = await soon(client.post(path, content=STREAM, headers=headers))
    assert (found.status_code, found.json()["error"]["type"]) == (404, "NotFoundError")


async def test_a_stream_without_a_key_has_no_ids(
    client: httpx.AsyncClient, instance: ScriptedInstance
) -> None:
    asking = asyncio.ensure_future(client.post(PATH, content=STREAM))
    execution = await instance.begun()
    execution.answer(chunk("{}", final=True))
    execution.end()
    found = await soon(asking)
    assert found.text == "data: {}\n\n" + DONE
    assert "sluice-stream" not in found.headers
