"""ModelStreamInfer: order, final flags and errors of responses."""

import pytest

from gateway.errors import Code, RefusedError
from gateway.frontends.grpc.outbox import StrictModeError
from gateway.models.model import Model
from gateway.protos import grpc_service_pb2 as pb
from tests.builders import (
    FLAG,
    ScriptedInstance,
    settle,
    soon,
    text_response,
)
from tests.conftest import Serve, tasks_left
from tests.gateway.conversations.chats import CHAT
from tests.gateway.frontends.grpc.stream_clients import BROKEN, StreamClient, begun, final_flag


async def test_a_response_carries_the_id_the_model_and_the_final_flag(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.ask("many", "r1")
        execution = await many.begun()
        execution.answer(text_response("a"))
        message = await call.answer()
        found = message.infer_response
        assert (found.id, found.model_name, found.model_version) == ("r1", "many", "1")
        assert list(found.raw_output_contents) == [b"\x01\0\0\0a"]
        assert final_flag(message) is False
        execution.finish("b")
        assert final_flag(await call.answer()) is True
        call.half_close()
        await call.ended()


async def test_an_idle_rpc_takes_three_tasks(models: list[Model], many: ScriptedInstance) -> None:
    await settle()
    before = len(tasks_left())
    async with StreamClient(*models) as call:
        call.ask("many", "r1")
        execution = await many.begun()
        await settle()
        # Those of the RPC, of the answer and of the execution.
        assert len(tasks_left()) - before == 3
        execution.finish("b")
        await call.answer()


async def test_the_only_response_is_final(models: list[Model], one: ScriptedInstance) -> None:
    async with StreamClient(*models) as call:
        call.ask("one", "r1")
        execution = await one.begun()
        execution.answer(text_response("a"))
        execution.end()
        message = await call.answer()
        assert final_flag(message) is True
        assert message.infer_response.id == "r1"


async def test_requests_interleave_and_each_keeps_its_order(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.ask("many", "r1")
        call.ask("many", "r2")
        first, second = await begun(many, 2)
        heard = []
        for execution, text in ((first, "a"), (second, "x"), (second, "y"), (first, "b")):
            execution.answer(text_response(text))
            heard.append(await call.said())
        assert heard == [("r1", "a"), ("r2", "x"), ("r2", "y"), ("r1", "b")]


async def test_models_that_are_not_decoupled_answer_in_the_order_of_requests(
    models: list[Model], one: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        for request_id in ("r1", "r2", "r3"):
            call.ask("one", request_id)
        first, second, third = await begun(one, 3)
        third.finish("c")
        second.crash(BROKEN)
        await settle()
        assert call.silent
        first.finish("a")
        assert await call.said() == ("r1", "a")
        message = await call.answer()
        assert (message.infer_response.id, message.error_message) == ("r2", "no such token")
        assert await call.said() == ("r3", "c")


async def test_decoupled_models_overtake_the_others(
    models: list[Model], one: ScriptedInstance, many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.ask("one", "slow")
        call.ask("many", "fast")
        slow, fast = await one.begun(), await many.begun()
        fast.finish("first")
        assert await call.said() == ("fast", "first")
        slow.finish("second")
        assert await call.said() == ("slow", "second")


async def test_an_empty_final_response_is_not_sent_without_the_parameter(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.ask("many", "r1")
        execution = await many.begun()
        execution.answer(text_response("a"))
        execution.answer(FLAG)
        execution.end()
        assert await call.said() == ("r1", "a")
        call.half_close()
        await call.ended()
        assert call.silent


@pytest.mark.parametrize("flagged", [True, False], ids=["with the flag", "without"])
async def test_an_empty_final_response_is_sent_with_the_parameter(
    models: list[Model], many: ScriptedInstance, flagged: bool
) -> None:
    async with StreamClient(*models) as call:
        call.ask("many", "r1", empty_final=True)
        execution = await many.begun()
        execution.answer(text_response("a"))
        if flagged:
            execution.answer(FLAG)
        execution.end()
        assert final_flag(await call.answer()) is False
        message = await call.answer()
        found = message.infer_response
        assert (final_flag(message), message.error_message) == (True, "")
        assert (found.id, found.model_name, found.model_version) == ("r1", "many", "")
        assert not found.outputs
        assert not found.raw_output_contents
        call.half_close()
        await call.ended()
        assert call.silent


async def test_a_final_response_with_data_is_the_only_final_one(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.ask("many", "r1", empty_final=True)
        (await many.begun()).finish("a")
        message = await call.answer()
        assert final_flag(message) is True
        call.half_close()
        await call.ended()
        assert call.silent


async def test_a_refused_request_is_a_message_with_its_id_and_the_rpc_continues(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.ask("nope", "r1")
        message = await call.answer()
        assert message.error_message == "Request for unknown model: 'nope' is not found"
        assert message.infer_response == pb.ModelInferResponse(id="r1")
        call.ask("many", "r2")
        (await many.begun()).finish("a")
        assert await call.said() == ("r2", "a")


@pytest.mark.parametrize("model", ["one", "many"])
async def test_an_error_of_a_model_is_a_message_and_the_rpc_continues(
    models: list[Model], one: ScriptedInstance, many: ScriptedInstance, model: str
) -> None:
    instance = {"one": one, "many": many}[model]
    async with StreamClient(*models) as call:
        call.ask(model, "r1", version="1")
        (await instance.begun()).crash(BROKEN)
        message = await call.answer()
        found = message.infer_response
        assert message.error_message == "no such token"
        assert (found.id, found.model_name, found.model_version) == ("r1", model, "1")
        assert final_flag(message) is True
        call.ask(model, "r2")
        (await instance.begun()).finish("a")
        assert await call.said() == ("r2", "a")


async def test_responses_before_an_error_are_sent(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.ask("many", "r1")
        execution = await many.begun()
        execution.answer(text_response("a"))
        execution.answer(BROKEN)
        execution.end()
        assert await call.said() == ("r1", "a")
        assert (await call.answer()).error_message == "no such token"


@pytest.mark.parametrize("count", [0, 2])
async def test_a_model_that_is_not_decoupled_has_one_response(
    models: list[Model], one: ScriptedInstance, count: int
) -> None:
    async with StreamClient(*models) as call:
        call.ask("one", "r1")
        execution = await one.begun()
        for _ in range(count):
            execution.answer(text_response("a"))
        execution.end()
        message = await call.answer()
        assert message.error_message == f"expected a single response, got {count}"


@pytest.mark.parametrize("model", ["one", "many"])
async def test_in_strict_mode_an_error_of_a_model_ends_the_rpc(
    models: list[Model], one: ScriptedInstance, many: ScriptedInstance, model: str
) -> None:
    instance = {"one": one, "many": many}[model]
    async with StreamClient(*models, strict=True) as call:
        call.ask(model, "r1")
        call.ask(model, "r2")
        first, second = await begun(instance, 2)
        first.crash(BROKEN)
        with pytest.raises(StrictModeError) as caught:
            await call.ended()
        assert caught.value.error is BROKEN
        await soon(second.stopped.wait())
    assert [len(model.requests) for model in models] == [0, 0]


async def test_in_strict_mode_a_refused_request_is_a_message_still(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models, strict=True) as call:
        call.ask("nope", "r1")
        assert (await call.answer()).error_message
        call.ask("many", "r2")
        (await many.begun()).finish("a")
        assert await call.said() == ("r2", "a")


async def test_a_turn_answers_after_the_last_answer_of_the_turn_before_it(serve: Serve) -> None:
    instance = ScriptedInstance()
    async with StreamClient(serve(instance, config=CHAT)) as call:
        call.say("chat", "count", "a", start=True)
        call.say("chat", "enough", "b")
        first = await instance.begun()
        call.reads.clear()
        first.answer(text_response("one"))
        await settle()  # the client does not take it: the end of this turn waits to be sent
        call.cancel_request("chat", "a")
        await soon(first.stopped.wait())
        second = await instance.begun()
        second.finish("fine")
        for _ in range(10):
            await settle()
        call.reads.set()
        assert await call.said() == ("a", "one")
        assert (await call.answer()).infer_response.parameters["cancelled"].bool_param
        assert await call.said() == ("b", "fine")
        call.half_close()
        await call.ended()
        assert call.silent


# Models that replicas host: a refusal arrives as an answer.

REFUSED = RefusedError(Code.ALREADY_EXISTS, "the turn 'a' has not ended")


@pytest.fixture
async def hosted(serve: Serve) -> tuple[Model, ScriptedInstance]:
    """A model with conversations, which are kept elsewhere."""
    instance = ScriptedInstance()
    model = serve(instance, config=CHAT)
    model.of_fleet = True
    return model, instance


async def test_a_refusal_by_a_replica_waits_for_no_other_turn(
    hosted: tuple[Model, ScriptedInstance],
) -> None:
    model, instance = hosted
    async with StreamClient(model) as call:
        call.say("chat", "count", "a", start=True)
        call.say("chat", "again", "a")
        first, second = await begun(instance, 2)
        second.crash(REFUSED)
        assert (await call.answer()).error_message == REFUSED.message
        first.finish("one")
        assert await call.said() == ("a", "one")


async def test_an_error_of_a_model_waits_for_earlier_turns(
    hosted: tuple[Model, ScriptedInstance],
) -> None:
    model, instance = hosted
    async with StreamClient(model) as call:
        call.say("chat", "count", "a", start=True)
        call.say("chat", "again", "b")
        first, second = await begun(instance, 2)
        second.crash(BROKEN)
        await soon(second.stopped.wait())
        await settle()
        assert call.silent
        first.finish("one")
        assert await call.said() == ("a", "one")
        assert (await call.answer()).error_message == BROKEN.message


async def test_an_id_that_a_replica_refused_cancels_the_request_of_another_rpc(
    hosted: tuple[Model, ScriptedInstance],
) -> None:
    model, instance = hosted
    async with StreamClient(model) as other, StreamClient(model) as mine:
        other.say("chat", "count", "a", start=True)
        first = await instance.begun()
        mine.say("chat", "again", "a")
        (await instance.begun()).crash(REFUSED)
        assert (await mine.answer()).error_message == REFUSED.message
        mine.cancel_request("chat", "a")
        assert (await other.answer()).infer_response.parameters["cancelled"].bool_param
        await soon(first.stopped.wait())


async def test_in_strict_mode_a_refusal_by_a_replica_is_a_message_still(
    hosted: tuple[Model, ScriptedInstance],
) -> None:
    model, instance = hosted
    async with StreamClient(model, strict=True) as call:
        call.say("chat", "count", "a")
        (await instance.begun()).crash(REFUSED)
        assert (await call.answer()).error_message == REFUSED.message
        call.half_close()
        await call.ended()
