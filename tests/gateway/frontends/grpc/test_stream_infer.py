"""ModelStreamInfer without a wire: order, errors, leaving, and slow clients."""

import asyncio
import json
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import pytest

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.methods import Method, ParsedMessages
from gateway.frontends.grpc.outbox import MAX_ANSWERS, Outbox
from gateway.frontends.grpc.parameters import HeaderForwarding
from gateway.frontends.grpc.protobuf_wire import Message
from gateway.frontends.grpc.request import RequestDecoder
from gateway.frontends.grpc.stream_infer import REFUSALS, StreamInfer, StrictModeError
from gateway.models.model import Model
from gateway.protos import grpc_service_pb2 as pb
from gateway.stream import DEFAULT_LIMIT
from gateway.threads import LARGE_BYTES
from tests.builders import (
    DECOUPLED,
    FLAG,
    TEXT,
    Execution,
    LoadedModels,
    ScriptedInstance,
    settle,
    soon,
    text_response,
)
from tests.conftest import Serve
from tests.gateway.conversations.chats import CHAT

BROKEN = InferenceError(Code.INVALID_ARG, "no such token")
MANY = replace(TEXT, name="many", model_transaction_policy=DECOUPLED)
ONE = replace(TEXT, name="one")


class RpcCall:
    """One RPC driven by hand: the test is the client."""

    def __init__(
        self,
        *models: Model,
        strict: bool = False,
        send_timeout_secs: float = 60.0,
        requests: AsyncIterable[Message] | None = None,
    ) -> None:
        self.reads = asyncio.Event()
        self.reads.set()
        self.taken = 0
        self._asked: asyncio.Queue[pb.ModelInferRequest | None] = asyncio.Queue()
        self._answers: asyncio.Queue[pb.ModelStreamInferResponse] = asyncio.Queue()
        dataplane = DataPlane(LoadedModels(*models))  # type: ignore[arg-type]
        decoder = RequestDecoder(dataplane.shared_memory, HeaderForwarding(""), ())
        outbox = Outbox(self._send, send_timeout_secs)
        self.rpc = StreamInfer(dataplane, decoder, outbox, strict=strict)
        self._sent = requests or self._requests()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.rpc.run(self._sent))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
        assert self._task is not None
        await soon(asyncio.wait([self._task]))

    def ask(
        self, model: str, request_id: str, *, version: str = "", empty_final: bool = False
    ) -> None:
        """Send a request whose text is its id."""
        tensor = pb.ModelInferRequest.InferInputTensor(
            name="text_input", datatype="BYTES", shape=[1]
        )
        tensor.contents.bytes_contents.append(request_id.encode())
        message = pb.ModelInferRequest(
            model_name=model, model_version=version, id=request_id, inputs=[tensor]
        )
        if empty_final:
            message.parameters["triton_enable_empty_final_response"].bool_param = True
        self._asked.put_nowait(message)

    def say(self, model: str, text: str, request_id: str, *, start: bool = False) -> None:
        """Send a turn of one conversation."""
        message = pb.ModelInferRequest(model_name=model, id=request_id)
        tensor = message.inputs.add(name="messages", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(json.dumps([{"content": text}]).encode())
        message.parameters["sequence_id"].int64_param = 7
        message.parameters["sequence_start"].bool_param = start
        self._asked.put_nowait(message)

    def cancel_request(self, model: str, request_id: str, *, wanted: bool = True) -> None:
        """Ask for the end of a request."""
        message = pb.ModelInferRequest(model_name=model, id=request_id)
        message.parameters["cancel"].bool_param = wanted
        self._asked.put_nowait(message)

    def half_close(self) -> None:
        """Send no more."""
        self._asked.put_nowait(None)

    def cancel(self) -> None:
        """Cancel the RPC."""
        assert self._task is not None
        self._task.cancel()

    async def answer(self) -> pb.ModelStreamInferResponse:
        """Read one message."""
        return await soon(self._answers.get())

    async def said(self) -> tuple[str, str]:
        """The id and the text of the next message."""
        message = await self.answer()
        assert message.error_message == ""
        (raw,) = message.infer_response.raw_output_contents
        return message.infer_response.id, raw[4:].decode()

    @property
    def unread(self) -> int:
        """How many requests the server has not read yet."""
        return self._asked.qsize()

    @property
    def silent(self) -> bool:
        """Whether there is no message to read."""
        return self._answers.empty()

    async def ended(self) -> None:
        """Wait for the end of the RPC; raises what it raised."""
        assert self._task is not None
        await soon(asyncio.shield(self._task))

    async def _requests(self) -> AsyncIterator[Message]:
        while (message := await self._asked.get()) is not None:
            yield message, message.raw_input_contents

    async def _send(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self.taken += 1
            await self.reads.wait()
            self._answers.put_nowait(pb.ModelStreamInferResponse.FromString(message))


def final_flag(message: pb.ModelStreamInferResponse) -> bool | None:
    parameters = message.infer_response.parameters
    if "triton_final_response" not in parameters:
        return None
    return parameters["triton_final_response"].bool_param


@pytest.fixture
async def many() -> ScriptedInstance:
    return ScriptedInstance()


@pytest.fixture
async def one() -> ScriptedInstance:
    return ScriptedInstance()


@pytest.fixture
async def models(serve: Serve, many: ScriptedInstance, one: ScriptedInstance) -> list[Model]:
    """`many` is decoupled, `one` is not."""
    return [serve(many, config=MANY), serve(one, config=ONE)]


async def begun(instance: ScriptedInstance, count: int) -> list[Execution]:
    return [await instance.begun() for _ in range(count)]


# Responses.


async def test_a_response_carries_the_id_the_model_and_the_final_flag(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with RpcCall(*models) as call:
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


async def test_the_only_response_is_final(models: list[Model], one: ScriptedInstance) -> None:
    async with RpcCall(*models) as call:
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
    async with RpcCall(*models) as call:
        call.ask("many", "r1")
        call.ask("many", "r2")
        first, second = await begun(many, 2)
        heard = []
        for execution, text in ((first, "a"), (second, "x"), (second, "y"), (first, "b")):
            execution.answer(text_response(text))
            heard.append(await call.said())
        assert heard == [("r1", "a"), ("r2", "x"), ("r2", "y"), ("r1", "b")]


async def test_models_that_are_not_decoupled_answer_in_the_order_they_were_asked(
    models: list[Model], one: ScriptedInstance
) -> None:
    async with RpcCall(*models) as call:
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
    async with RpcCall(*models) as call:
        call.ask("one", "slow")
        call.ask("many", "fast")
        slow, fast = await one.begun(), await many.begun()
        fast.finish("first")
        assert await call.said() == ("fast", "first")
        slow.finish("second")
        assert await call.said() == ("slow", "second")


# The empty final response.


async def test_an_empty_final_response_is_kept_from_who_did_not_ask(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with RpcCall(*models) as call:
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
async def test_an_empty_final_response_is_sent_to_who_asked(
    models: list[Model], many: ScriptedInstance, flagged: bool
) -> None:
    async with RpcCall(*models) as call:
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
    async with RpcCall(*models) as call:
        call.ask("many", "r1", empty_final=True)
        (await many.begun()).finish("a")
        message = await call.answer()
        assert final_flag(message) is True
        call.half_close()
        await call.ended()
        assert call.silent


# Errors.


async def test_a_refused_request_is_a_message_with_its_id_and_the_stream_lives_on(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with RpcCall(*models) as call:
        call.ask("nope", "r1")
        message = await call.answer()
        assert message.error_message == "Request for unknown model: 'nope' is not found"
        assert message.infer_response == pb.ModelInferResponse(id="r1")
        call.ask("many", "r2")
        (await many.begun()).finish("a")
        assert await call.said() == ("r2", "a")


@pytest.mark.parametrize("model", ["one", "many"])
async def test_a_models_error_is_a_message_and_the_stream_lives_on(
    models: list[Model], one: ScriptedInstance, many: ScriptedInstance, model: str
) -> None:
    instance = {"one": one, "many": many}[model]
    async with RpcCall(*models) as call:
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
    async with RpcCall(*models) as call:
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
    async with RpcCall(*models) as call:
        call.ask("one", "r1")
        execution = await one.begun()
        for _ in range(count):
            execution.answer(text_response("a"))
        execution.end()
        message = await call.answer()
        assert message.error_message == f"expected a single response, got {count}"


# Strict mode.


@pytest.mark.parametrize("model", ["one", "many"])
async def test_in_strict_mode_a_models_error_ends_the_rpc(
    models: list[Model], one: ScriptedInstance, many: ScriptedInstance, model: str
) -> None:
    instance = {"one": one, "many": many}[model]
    async with RpcCall(*models, strict=True) as call:
        call.ask(model, "r1")
        call.ask(model, "r2")
        first, second = await begun(instance, 2)
        first.crash(BROKEN)
        with pytest.raises(StrictModeError) as caught:
            await call.ended()
        assert caught.value.error is BROKEN
        await soon(second.stopped.wait())
    assert [model.in_flight for model in models] == [0, 0]


async def test_in_strict_mode_a_refused_request_is_a_message_still(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with RpcCall(*models, strict=True) as call:
        call.ask("nope", "r1")
        assert (await call.answer()).error_message
        call.ask("many", "r2")
        (await many.begun()).finish("a")
        assert await call.said() == ("r2", "a")


# The end.


async def test_after_a_half_close_what_was_asked_is_answered(
    models: list[Model], many: ScriptedInstance, one: ScriptedInstance
) -> None:
    async with RpcCall(*models) as call:
        call.ask("many", "r1")
        call.ask("one", "r2")
        executions = [await many.begun(), await one.begun()]
        call.half_close()
        await settle()
        executions[0].answer(text_response("a"))
        assert await call.said() == ("r1", "a")
        executions[0].finish("b")
        assert await call.said() == ("r1", "b")
        executions[1].finish("c")
        assert await call.said() == ("r2", "c")
        await call.ended()


async def test_a_half_close_at_once_ends_the_rpc(models: list[Model]) -> None:
    async with RpcCall(*models) as call:
        call.half_close()
        await call.ended()


async def test_a_server_that_drains_reads_no_more_and_answers_what_was_asked(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with RpcCall(*models) as call:
        call.ask("many", "r1")
        execution = await many.begun()
        call.rpc.stop_reading()
        await settle()
        call.ask("many", "too late")
        execution.finish("a")
        assert await call.said() == ("r1", "a")
        await call.ended()
    assert many.asked == ["r1"]


async def test_a_server_that_drains_answers_a_message_that_its_reader_has_not_seen_yet(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with RpcCall(*models) as call:
        await settle()
        call.ask("many", "r1")
        call.rpc.stop_reading()
        (await many.begun()).finish("a")
        assert await call.said() == ("r1", "a")
        await call.ended()
    assert many.asked == ["r1"]


async def test_a_server_that_drains_answers_a_large_message_that_is_being_parsed(
    models: list[Model], many: ScriptedInstance
) -> None:
    parsed = asyncio.Event()

    async def parse(data: bytes, call: object) -> Message:
        await parsed.wait()
        message = pb.ModelInferRequest.FromString(data)
        return message, message.raw_input_contents

    async def sent() -> AsyncIterator[bytes]:
        tensor = pb.ModelInferRequest.InferInputTensor(
            name="text_input", datatype="BYTES", shape=[1]
        )
        tensor.contents.bytes_contents.append(b"r1".ljust(LARGE_BYTES))
        yield pb.ModelInferRequest(model_name="many", id="r1", inputs=[tensor]).SerializeToString()
        await asyncio.Event().wait()

    method = Method(_never, _never, _never, client_streams=True, parse_large=parse)
    async with RpcCall(*models, requests=ParsedMessages(method, sent(), None)) as call:  # type: ignore[arg-type]
        await settle()
        call.rpc.stop_reading()
        await settle()
        parsed.set()
        (await many.begun()).finish("a")
        assert await call.said() == ("r1", "a")
        await call.ended()


def _never(*_: object) -> Any:
    raise AssertionError("a large message is parsed otherwise, and the RPC is served by hand")


async def test_a_server_that_drains_sends_a_refusal_that_waits_for_a_slow_client(
    models: list[Model],
) -> None:
    async with RpcCall(*models) as call:
        call.reads.clear()
        for number in range(REFUSALS + 2):
            call.ask("nope", str(number))
        for _ in range(REFUSALS + 2):
            await settle()
        assert call.unread == 1, "the refusal of the last message read waits for its permit"
        call.rpc.stop_reading()
        await settle()
        call.reads.set()
        heard = [(await call.answer()).infer_response.id for _ in range(REFUSALS + 1)]
        assert heard == [str(number) for number in range(REFUSALS + 1)]
        await call.ended()
        assert call.silent


async def test_a_server_that_drains_answers_a_cancellation_that_waits_for_a_slow_client(
    models: list[Model],
) -> None:
    async with RpcCall(*models) as call:
        call.reads.clear()
        for number in range(REFUSALS):
            call.ask("nope", str(number))
        call.cancel_request("many", "unknown")
        for _ in range(REFUSALS):
            await settle()
        assert call.unread == 0
        call.rpc.stop_reading()
        await settle()
        call.reads.set()
        heard = {(await call.answer()).infer_response.id for _ in range(REFUSALS + 1)}
        assert heard == {"unknown", *map(str, range(REFUSALS))}
        await call.ended()


@pytest.mark.parametrize("model", ["one", "many"])
async def test_cancelling_the_rpc_stops_every_request(
    models: list[Model], one: ScriptedInstance, many: ScriptedInstance, model: str
) -> None:
    instance = {"one": one, "many": many}[model]
    async with RpcCall(*models) as call:
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
    assert [model.in_flight for model in models] == [0, 0]


async def test_a_request_that_comes_as_the_rpc_is_cancelled_is_stopped_too(
    models: list[Model],
) -> None:
    async with RpcCall(*models) as call:
        await settle()  # the reader waits for a request
        asyncio.get_running_loop().call_soon(call.ask, "many", "r1")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.ended()
    assert [model.in_flight for model in models] == [0, 0]


async def test_cancelling_drops_what_is_queued(serve: Serve) -> None:
    instance = ScriptedInstance(concurrency=1)
    model = serve(instance, config=MANY)
    async with RpcCall(model) as call:
        call.ask("many", "r1")
        call.ask("many", "r2")
        await instance.begun()
    await settle()
    assert instance.asked == ["r1"]
    assert model.in_flight == 0


async def test_an_rpc_that_ends_disturbs_no_other(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with RpcCall(*models) as stays:
        stays.ask("many", "r1")
        execution = await many.begun()
        async with RpcCall(*models) as leaves:
            leaves.ask("many", "r2")
            await many.begun()
        execution.finish("still here")
        assert await stays.said() == ("r1", "still here")


# Slow clients.


async def test_a_slow_client_holds_back_the_model(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with RpcCall(*models) as call:
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


async def test_a_client_that_takes_nothing_for_too_long_has_gone(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with RpcCall(*models, send_timeout_secs=0.01) as call:
        call.reads.clear()
        call.ask("many", "r1")
        execution = await many.begun()
        execution.answer(text_response("a"))
        with pytest.raises(TimeoutError):
            await call.ended()
        await soon(execution.stopped.wait())
    assert [model.in_flight for model in models] == [0, 0]


async def test_leaving_a_full_stream_leaves_nothing(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with RpcCall(*models) as call:
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
    assert [model.in_flight for model in models] == [0, 0]


async def test_a_client_that_asks_much_and_reads_nothing_is_not_read_without_end(
    models: list[Model],
) -> None:
    async with RpcCall(*models) as call:
        call.reads.clear()
        for number in range(5000):
            call.ask("nope", str(number))
        for _ in range(500):
            await settle()
        assert call.unread > 1000, "the server takes no more than it can remember"
        call.reads.set()
        heard = [(await call.answer()).infer_response.id for _ in range(5000)]
        assert heard == [str(number) for number in range(5000)]


async def test_answers_that_wait_for_their_turn_keep_more_requests_from_being_read(
    models: list[Model], one: ScriptedInstance
) -> None:
    async with RpcCall(*models) as call:
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


async def test_a_request_is_cancelled_by_its_id_and_what_it_had_said_comes_before(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with RpcCall(*models) as call:
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


async def test_a_client_that_does_not_read_can_cancel_and_gets_all_that_was_said(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with RpcCall(*models) as call:
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
    async with RpcCall(*models, strict=True) as call:
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


async def test_cancelling_is_not_what_any_other_value_of_the_parameter_means(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with RpcCall(*models) as call:
        call.ask("many", "r1")
        execution = await many.begun()
        call.cancel_request("many", "r1", wanted=False)
        refused = await call.answer()
        assert "expected 1 inputs" in refused.error_message
        execution.finish("done")
        assert await call.said() == ("r1", "done")


async def test_a_turn_answers_after_the_last_answer_of_the_turn_before_it(serve: Serve) -> None:
    instance = ScriptedInstance()
    async with RpcCall(serve(instance, config=CHAT)) as call:
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
