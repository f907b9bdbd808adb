"""Disconnects from OpenAI's endpoints, and the end of each request."""

import httpx
import pytest

from tests.builders import ScriptedInstance, settle, soon
from tests.conftest import Serve, tasks_left
from tests.exchange import Exchange
from tests.gateway.frontends.http.conftest import Open
from tests.gateway.frontends.http.openai.conftest import (
    CHAT,
    app_of,
    body,
)

ASK = body(model="chat", messages=[], temperature=0.5)


@pytest.fixture
async def instance() -> ScriptedInstance:
    """The part that the test drives."""
    return ScriptedInstance(None)


async def answer(
    client: httpx.AsyncClient, content: bytes = ASK, path: str = "/v1/chat/completions"
) -> httpx.Response:
    return await soon(client.post(path, content=content))


@pytest.fixture
async def client(serve: Serve, connect: Open, instance: ScriptedInstance) -> httpx.AsyncClient:
    """A client of a server with the model `chat`."""
    return connect(app_of(serve(instance, config=CHAT)))


# Leaving.


async def test_a_disconnect_before_the_answer_stops_the_model(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model = serve(instance, config=CHAT)
    async with Exchange(app_of(model), "/v1/chat/completions", ASK) as exchange:
        execution = await instance.begun()
        exchange.leave()
        await soon(execution.stopped.wait())
        await exchange.ended()
    assert (model.in_flight, model.statistics.fail.count) == (0, 1)


async def test_nothing_is_left_when_a_request_has_been_answered(
    client: httpx.AsyncClient, instance: ScriptedInstance
) -> None:
    await settle()
    before = set(tasks_left())
    await answer(client, b'{"model":"nope"}')
    assert set(tasks_left()) == before
