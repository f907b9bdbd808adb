"""ModelStreamInfer: flow control for slow clients."""

import pytest

from gateway.frontends.grpc.outbox import MAX_ANSWERS
from gateway.models.model import Model
from gateway.stream import DEFAULT_LIMIT
from tests.builders import (
    ScriptedInstance,
    settle,
    soon,
    text_response,
)
from tests.gateway.frontends.grpc.stream_clients import StreamClient


async def test_a_slow_client_blocks_the_model(models: list[Model], many: ScriptedInstance) -> None:
    async with StreamClient(*models) as call:
        call.reads.clear()
        call.ask("many", "r1")
        execution = await many.begun()
        bound = 3 * DEFAULT_LIMIT  # one is written, one is full, one is on its way
        total = 2 * bound
        for number in range(total):
            execution.answer(text_response(str(number), final=number == total - 1))
        execution.end()
        for _ in range(100):
            await settle()
        assert execution.taken <= bound
        call.reads.set()
        heard = [await call.said() for _ in range(total)]
        assert heard == [("r1", str(number)) for number in range(total)]


async def test_a_client_that_does_not_read_is_dropped_after_the_timeout(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models, send_timeout_secs=0.01) as call:
        call.reads.clear()
        call.ask("many", "r1")
        execution = await many.begun()
        execution.answer(text_response("a"))
        with pytest.raises(TimeoutError):
            await call.ended()
        await soon(execution.stopped.wait())
    assert [len(model.requests) for model in models] == [0, 0]


async def test_a_disconnect_of_a_full_stream_frees_everything(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.reads.clear()
        call.ask("many", "r1")
        execution = await many.begun()
        for number in range(48 * DEFAULT_LIMIT):
            execution.answer(text_response(str(number)))
        for _ in range(100):
            await settle()
        assert not execution.stopped.is_set()
        call.cancel()
        await soon(execution.stopped.wait())
    assert [len(model.requests) for model in models] == [0, 0]


async def test_reading_requests_blocks_while_the_client_does_not_read(
    models: list[Model],
) -> None:
    async with StreamClient(*models) as call:
        call.reads.clear()
        for number in range(5000):
            call.ask("nope", str(number))
        for _ in range(500):
            await settle()
        assert call.unread > 1000, "the server takes no more than it can remember"
        call.reads.set()
        heard = [(await call.answer()).infer_response.id for _ in range(5000)]
        assert heard == [str(number) for number in range(5000)]


async def test_reading_requests_blocks_at_the_limit_of_unsent_responses(
    models: list[Model], one: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.ask("one", "first")
        first = await one.begun()
        names = [str(number) for number in range(MAX_ANSWERS)]
        for name in names:
            call.ask("one", name)
            (await one.begun()).finish(name)
        await settle()
        call.ask("one", "read already")
        call.ask("one", "too many")
        (await one.begun()).finish("read already")
        for _ in range(100):
            await settle()
        assert call.unread == 1
        first.finish("first")
        expected = ["first", *names, "read already"]
        assert [await call.said() for _ in expected] == [(name, name) for name in expected]
        (await one.begun()).finish("too many")
        assert await call.said() == ("too many", "too many")
