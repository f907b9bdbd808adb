"""A stream of OpenAI's over a real data plane: begin, events, and end."""

from dataclasses import replace

import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.http.openai.answers import ChunkEncoder
from gateway.messages import response_of_text
from gateway.openai_contract import RESPONSE, Endpoint
from gateway.stream import DEFAULT_LIMIT, INTERRUPTED
from tests.builders import FLAG, ScriptedInstance, settle, soon
from tests.conftest import Serve
from tests.exchange import Exchange
from tests.gateway.frontends.http.openai.conftest import CHAT, SETTINGS, app_of, body, chunk

ASK = body(model="chat", stream=True)
DONE = b"data: [DONE]\n\n"
CANCELLED = (
    b'data: {"error":{"message":"Request was cancelled","type":"ClientClosedRequestError",'
    b'"param":null,"code":499}}\n\n'
)
PATH = "/v1/chat/completions"


async def test_each_chunk_is_an_event_and_done_is_the_last(
    serve: Serve, instance: ScriptedInstance
) -> None:
    async with Exchange(app_of(serve(instance, config=CHAT)), PATH, ASK) as exchange:
        execution = await instance.begun()
        assert not exchange.started
        execution.answer(chunk('{"a": 1}'))
        status, headers = await exchange.start()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert headers["x-request-id"]
        assert await exchange.chunk() == b'data: {"a": 1}\n\n'
        execution.answer(chunk('{"b": 2}', final=True))
        execution.end()
        assert await exchange.rest() == b'data: {"b": 2}\n\n' + DONE


async def test_an_empty_final_response_is_no_event(
    serve: Serve, instance: ScriptedInstance
) -> None:
    async with Exchange(app_of(serve(instance, config=CHAT)), PATH, ASK) as exchange:
        execution = await instance.begun()
        execution.answer(chunk("{}"))
        execution.answer(FLAG)
        execution.end()
        await exchange.start()
        assert await exchange.rest() == b"data: {}\n\n" + DONE


async def test_named_events_are_not_followed_by_done(
    serve: Serve, instance: ScriptedInstance
) -> None:
    async with Exchange(app_of(serve(instance, config=CHAT)), "/v1/responses", ASK) as exchange:
        execution = await instance.begun()
        execution.answer(chunk("{}", "response.completed", final=True))
        execution.end()
        await exchange.start()
        assert await exchange.rest() == b"event: response.completed\ndata: {}\n\n"


async def test_an_error_in_mid_stream_is_an_event_before_done(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model = serve(instance, config=CHAT)
    async with Exchange(app_of(model), PATH, ASK) as exchange:
        execution = await instance.begun()
        execution.answer(chunk("{}"))
        await exchange.start()
        await exchange.chunk()
        execution.answer(InferenceError(Code.INTERNAL, "broken"))
        execution.end()
        assert await exchange.rest() == (
            b'data: {"error":{"message":"broken","type":"InternalServerError","param":null,'
            b'"code":500}}\n\n' + DONE
        )
    assert model.statistics.fail.count == 1


async def test_a_crash_in_mid_stream_is_not_shown_to_the_client(
    serve: Serve, instance: ScriptedInstance
) -> None:
    async with Exchange(app_of(serve(instance, config=CHAT)), PATH, ASK) as exchange:
        execution = await instance.begun()
        execution.answer(chunk("{}"))
        await exchange.start()
        await exchange.chunk()
        execution.crash(RuntimeError("/secret/path"))
        rest = await exchange.rest()
        assert b'"code":500' in rest
        assert b"secret" not in rest


async def test_a_request_cancelled_by_its_id_ends_with_that_error(
    serve: Serve, instance: ScriptedInstance
) -> None:
    async with Exchange(app_of(serve(instance, config=CHAT)), PATH, ASK) as exchange:
        execution = await instance.begun()
        execution.answer(chunk("{}"))
        execution.answer(INTERRUPTED)
        execution.end()
        await exchange.start()
        assert await exchange.rest() == b"data: {}\n\n" + CANCELLED + DONE


async def test_the_headers_wait_no_longer_than_the_limit(
    serve: Serve, instance: ScriptedInstance
) -> None:
    settings = replace(SETTINGS, first_response_secs=0.01, keep_alive_secs=0.01)
    app = app_of(serve(instance, config=CHAT), settings=settings)
    async with Exchange(app, PATH, ASK) as exchange:
        execution = await instance.begun()
        assert (await exchange.start())[0] == 200
        assert await exchange.chunk() == b": keep-alive\n\n"
        execution.crash(InferenceError(Code.INTERNAL, "too late for a status"))
        rest = await exchange.rest()
        assert b'"message":"too late for a status"' in rest
        assert rest.endswith(DONE)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_disconnect_stops_the_model(
    serve: Serve, instance: ScriptedInstance, begun: bool
) -> None:
    model = serve(instance, config=CHAT)
    async with Exchange(app_of(model), PATH, ASK) as exchange:
        execution = await instance.begun()
        if begun:
            execution.answer(chunk("{}"))
            await exchange.start()
            await exchange.chunk()
        exchange.leave()
        await soon(execution.stopped.wait())
        await exchange.ended()
    assert (len(model.requests), model.statistics.fail.count) == (0, 1)


async def test_a_slow_client_holds_back_the_model_and_gets_chunks_in_few_writes(
    serve: Serve, instance: ScriptedInstance
) -> None:
    async with Exchange(app_of(serve(instance, config=CHAT)), PATH, ASK) as exchange:
        execution = await instance.begun()
        execution.answer(chunk("{}"))
        await exchange.start()
        await exchange.chunk()
        exchange.reads.clear()
        total = 10 * DEFAULT_LIMIT
        for number in range(total):
            execution.answer(chunk(str(number), final=number == total - 1))
        execution.end()
        for _ in range(100):
            await settle()
        assert execution.taken <= 3 * DEFAULT_LIMIT, "one write, one batch, one full stream"
        exchange.reads.set()
        assert (await exchange.rest()).count(b"data: ") == total + 1


@pytest.mark.parametrize("text", [b"{}", b"", b'{"a": "\xc3\xa9"}', b"{\n}", b"{\r}"])
def test_the_event_of_a_text_is_that_of_its_response(text: bytes) -> None:
    encoder = ChunkEncoder("chat", Endpoint.CHAT)
    found = encoder.text_event(RESPONSE, text)
    is_one_line = len(text.splitlines()) < 2 and text == text.strip()
    assert (found is None) == (not is_one_line)
    assert found in {None, encoder.events([response_of_text(RESPONSE, text, 1)])}
    assert encoder.text_event("other", text) is None
