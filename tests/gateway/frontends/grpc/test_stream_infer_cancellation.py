"""ModelStreamInfer: cancellation of the RPC and of single requests."""

import asyncio

import pytest

from gateway.models.model import Model
from gateway.stream import DEFAULT_LIMIT
from tests.builders import (
    ScriptedInstance,
    settle,
    soon,
    text_response,
)
from tests.conftest import Serve
from tests.gateway.frontends.grpc.stream_clients import MANY, StreamClient, begun, final_flag


@pytest.mark.parametrize("model", ["one", "many"])
async def test_cancelling_the_rpc_stops_every_request(
    models: list[Model], one: ScriptedInstance, many: ScriptedInstance, model: str
) -> None:
    instance = {"one": one, "many": many}[model]
    async with StreamClient(*models) as call:
        call.ask(model, "r1")
        call.ask(model, "r2")
        executions = await begun(instance, 2)
        executions[0].answer(text_response("a"))
        await settle()
        call.cancel()
        for execution in executions:
            await soon(execution.stopped.wait())
        with pytest.raises(asyncio.CancelledError):
            await call.ended()
    assert [len(model.requests) for model in models] == [0, 0]


async def test_a_request_received_during_cancellation_is_cancelled(
    models: list[Model],
) -> None:
    async with StreamClient(*models) as call:
        await settle()  # the reader waits for a request
        asyncio.get_running_loop().call_soon(call.ask, "many", "r1")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.ended()
    assert [len(model.requests) for model in models] == [0, 0]


async def test_cancelling_drops_queued_requests(serve: Serve) -> None:
    instance = ScriptedInstance(concurrency=1)
    model = serve(instance, config=MANY)
    async with StreamClient(model) as call:
        call.ask("many", "r1")
        call.ask("many", "r2")
        await instance.begun()
    await settle()
    assert instance.asked == ["r1"]
    assert len(model.requests) == 0


async def test_the_end_of_an_rpc_does_not_affect_others(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as stays:
        stays.ask("many", "r1")
        execution = await many.begun()
        async with StreamClient(*models) as leaves:
            leaves.ask("many", "r2")
            await many.begun()
        execution.finish("still here")
        assert await stays.said() == ("r1", "still here")


async def test_a_request_is_cancelled_by_its_id_after_its_earlier_responses(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.ask("many", "r1")
        execution = await many.begun()
        execution.answer(text_response("one"))
        await settle()
        call.cancel_request("many", "r1")
        await soon(execution.stopped.wait())
        assert await call.said() == ("r1", "one")
        last = await call.answer()
        assert (last.infer_response.id, last.error_message, final_flag(last)) == ("r1", "", True)
        assert last.infer_response.parameters["cancelled"].bool_param
        call.half_close()
        await call.ended()
        assert call.silent


async def test_a_client_that_does_not_read_can_cancel_and_gets_all_responses(
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
        call.cancel_request("many", "r1")
        await soon(execution.stopped.wait())
        call.reads.set()
        heard = []
        while not final_flag(answer := await call.answer()):
            heard.append(int(answer.infer_response.raw_output_contents[0][4:]))
        assert heard == list(range(len(heard)))
        assert len(heard) > DEFAULT_LIMIT


async def test_in_strict_mode_cancelling_a_request_does_not_end_the_rpc(
    models: list[Model], many: ScriptedInstance, one: ScriptedInstance
) -> None:
    async with StreamClient(*models, strict=True) as call:
        call.ask("many", "r1")
        call.ask("one", "r2")
        await many.begun()
        for model, request_id in (("many", "r1"), ("one", "r2"), ("one", "r2")):
            call.cancel_request(model, request_id)
        found = [await call.answer() for _ in range(3)]
        assert sorted(each.infer_response.id for each in found) == ["r1", "r2", "r2"]
        call.ask("one", "r3")
        await one.begun()
        (await one.begun()).finish("alive")
        assert await call.said() == ("r3", "alive")


async def test_only_the_value_true_of_the_parameter_cancels(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.ask("many", "r1")
        execution = await many.begun()
        call.cancel_request("many", "r1", wanted=False)
        refused = await call.answer()
        assert "expected 1 inputs" in refused.error_message
        execution.finish("done")
        assert await call.said() == ("r1", "done")
