"""Disconnects from OpenAI's endpoints, and the end of each request."""

import httpx

from tests.builders import ScriptedInstance, settle, soon
from tests.conftest import Serve, tasks_left
from tests.exchange import Exchange
from tests.gateway.frontends.http.openai.conftest import (
    ASK,
    CHAT,
    answer,
    app_of,
)

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
    assert (len(model.requests), model.statistics.fail.count) == (0, 1)


async def test_nothing_is_left_when_a_request_has_been_answered(
    client: httpx.AsyncClient, instance: ScriptedInstance
) -> None:
    await settle()
    before = set(tasks_left())
    await answer(client, b'{"model":"nope"}')
    assert set(tasks_left()) == before
