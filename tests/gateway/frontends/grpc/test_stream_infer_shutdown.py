"""ModelStreamInfer: half-close, and the drain of the server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.frontends.grpc.protobuf_wire import Message
from gateway.frontends.grpc.rpc import Method, ParsedMessages
from gateway.frontends.grpc.status import RpcError, StatusCode
from gateway.frontends.grpc.stream_infer import REFUSALS
from gateway.models.model import Model
from gateway.protos import grpc_service_pb2 as pb
from gateway.threads import LARGE_BYTES
from tests.builders import (
    ScriptedInstance,
    settle,
    text_response,
)
from tests.gateway.frontends.grpc.stream_clients import StreamClient


async def test_requests_before_a_half_close_are_answered(
    models: list[Model], many: ScriptedInstance, one: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
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


async def test_an_immediate_half_close_ends_the_rpc(models: list[Model]) -> None:
    async with StreamClient(*models) as call:
        call.half_close()
        await call.ended()


async def ended_by_the_server(call: StreamClient) -> None:
    """The RPC ends with an error: the client cannot know which of its messages were read."""
    with pytest.raises(RpcError, match="Server exiting") as raised:
        await call.ended()
    assert raised.value.status is StatusCode.UNAVAILABLE


async def test_a_half_closed_rpc_ends_without_an_error_in_a_drain(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.ask("many", "r1")
        execution = await many.begun()
        call.half_close()
        await settle()
        call.rpc.stop_reading()
        execution.finish("a")
        assert await call.said() == ("r1", "a")
        await call.ended()


async def test_a_half_close_that_has_arrived_is_read_in_a_drain(models: list[Model]) -> None:
    async with StreamClient(*models) as call:
        await settle()
        call.ask("unknown", "r1")
        call.half_close()
        call.rpc.stop_reading()
        assert (await call.answer()).infer_response.id == "r1"
        await call.ended()


async def test_a_half_close_behind_refusals_of_a_slow_client_is_read_in_a_drain(
    models: list[Model],
) -> None:
    async with StreamClient(*models) as call:
        call.reads.clear()
        for number in range(REFUSALS + 1):
            call.ask("unknown", str(number))
        call.half_close()
        await settle()
        call.rpc.stop_reading()
        await settle()
        call.reads.set()
        for _ in range(REFUSALS + 1):
            await call.answer()
        await call.ended()


async def test_a_draining_server_stops_reading_and_answers_received_requests(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.ask("many", "r1")
        execution = await many.begun()
        call.rpc.stop_reading()
        await settle()
        call.ask("many", "too late")
        execution.finish("a")
        assert await call.said() == ("r1", "a")
        await ended_by_the_server(call)
    assert many.asked == ["r1"]


async def test_a_draining_server_answers_a_message_not_yet_read(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        await settle()
        call.ask("many", "r1")
        call.rpc.stop_reading()
        (await many.begun()).finish("a")
        assert await call.said() == ("r1", "a")
        await ended_by_the_server(call)
    assert many.asked == ["r1"]


async def test_a_draining_server_answers_a_large_message_being_parsed(
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
    async with StreamClient(*models, requests=ParsedMessages(method, sent(), None)) as call:  # type: ignore[arg-type]
        await settle()
        call.rpc.stop_reading()
        await settle()
        parsed.set()
        (await many.begun()).finish("a")
        assert await call.said() == ("r1", "a")
        await ended_by_the_server(call)


def _never(*_: object) -> Any:
    raise AssertionError("a large message is parsed otherwise, and the RPC is served by hand")


async def test_a_draining_server_sends_a_refusal_to_a_slow_client(
    models: list[Model],
) -> None:
    async with StreamClient(*models) as call:
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
        await ended_by_the_server(call)
        assert call.silent


async def test_a_draining_server_answers_a_cancellation_of_a_slow_client(
    models: list[Model],
) -> None:
    async with StreamClient(*models) as call:
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
        await ended_by_the_server(call)
