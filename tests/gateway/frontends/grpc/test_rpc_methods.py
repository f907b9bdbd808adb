"""Parsing, serialization and translation of errors around a method."""

import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.rpc import UNPARSABLE, ClientDisconnected, Method, Parse, RpcCall
from gateway.frontends.grpc.server import methods
from gateway.frontends.grpc.status import RpcError, StatusCode
from gateway.protos import grpc_service_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
READY = pb.ModelReadyRequest(name="m").SerializeToString()
NO_CALL: Any = None


class Servicer:
    """Has a method of every name of the service; each is the same."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __getattr__(self, name: str) -> Any:
        return self._method


class Sent:
    """Stores the messages of a method."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    async def send(self, messages: Sequence[bytes]) -> None:
        self.messages += messages


def found(name: str, method: Any, in_bytes: dict[str, Parse] | None = None) -> Method:
    return dict(methods(SERVICE, Servicer(method), in_bytes))[f"/{SERVICE.full_name}/{name}"]


async def ending(method: Any, data: bytes = READY) -> tuple[StatusCode, str]:
    with pytest.raises(RpcError) as caught:
        await found("ModelReady", method).answer(data, NO_CALL)
    return caught.value.status, caught.value.details


async def answer(request: pb.ModelReadyRequest, call: RpcCall) -> pb.ModelReadyResponse:
    return pb.ModelReadyResponse(ready=request.name == "m")


def raising(error: Exception) -> Any:
    async def method(request: Any, call: RpcCall) -> None:
        raise error

    return method


async def sent(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def run(method: Method, *messages: bytes) -> list[bytes]:
    call: Any = Sent()
    await method.run(sent(*messages), call)
    return list(call.messages)


def test_every_method_of_the_service_has_a_path() -> None:
    paths = dict(methods(SERVICE, Servicer(answer)))
    assert len(paths) == len(SERVICE.methods)
    assert {path.split("/")[1] for path in paths} == {"inference.GRPCInferenceService"}


async def test_a_method_takes_and_gives_messages() -> None:
    method = found("ModelReady", answer)
    assert method.unary
    assert pb.ModelReadyResponse.FromString(await method.answer(READY, NO_CALL)).ready


async def test_a_method_with_a_parser_gives_bytes() -> None:
    async def reverse(data: bytes, call: RpcCall) -> bytes:
        return data[::-1]

    method = found("ModelReady", reverse, {"ModelReady": bytes.upper})
    assert await method.answer(b"abc", NO_CALL) == b"CBA"


async def test_a_method_that_streams_takes_an_iterator_and_sends_its_answers() -> None:
    async def echo(messages: AsyncIterator[bytes], call: RpcCall) -> None:
        async for message in messages:
            await call.send([message, message])

    method = found("ModelStreamInfer", echo, {"ModelStreamInfer": bytes.upper})
    assert not method.unary
    assert await run(method, b"a", b"b") == [b"A", b"A", b"B", b"B"]


async def test_a_method_with_a_streaming_client_may_return_one_message() -> None:
    async def joined(messages: AsyncIterator[bytes], call: RpcCall) -> bytes:
        return b"".join([message async for message in messages])

    assert await run(Method(joined, bytes, bytes, client_streams=True), b"a", b"b") == [b"ab"]


async def test_a_streaming_method_may_take_one_message() -> None:
    async def told(message: bytes, call: RpcCall) -> None:
        await call.send([message])

    method = Method(told, bytes, bytes, server_streams=True)
    assert await run(method, b"a") == [b"a"]
    with pytest.raises(RpcError, match="no message") as caught:
        await run(method)
    assert caught.value.status is StatusCode.UNIMPLEMENTED


async def test_an_invalid_message_is_refused() -> None:
    assert await ending(answer, b"\xff") == (StatusCode.INTERNAL, UNPARSABLE)


async def test_an_invalid_message_in_a_stream_is_refused() -> None:
    async def read(messages: AsyncIterator[Any], call: RpcCall) -> None:
        async for _ in messages:
            pass

    with pytest.raises(RpcError, match=UNPARSABLE):
        await run(found("ModelStreamInfer", read), b"\xff")


async def test_an_error_becomes_the_status() -> None:
    error = InferenceError(Code.NOT_FOUND, "no such model")
    assert await ending(raising(error)) == (StatusCode.NOT_FOUND, "no such model")


@pytest.mark.parametrize(("character", "kept"), [("a", 6144), ("ü", 512), ("\n", 512)])
async def test_a_long_message_is_cut(character: str, kept: int) -> None:
    error = InferenceError(Code.INVALID_ARG, character * 10_000)
    assert await ending(raising(error)) == (StatusCode.INVALID_ARGUMENT, character * kept)


async def test_an_unexpected_error_is_logged_once_and_its_text_is_not_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        ended = await ending(raising(KeyError("/secret/path")))
    assert ended == (StatusCode.INTERNAL, "internal error; the server's log says why")
    (record,) = caplog.records
    assert record.exc_info is not None


async def test_a_method_may_end_the_rpc_itself() -> None:
    error = RpcError(StatusCode.UNIMPLEMENTED, "not here")
    assert await ending(raising(error)) == (StatusCode.UNIMPLEMENTED, "not here")


async def test_a_disconnect_is_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ClientDisconnected):
        await found("ModelReady", raising(ClientDisconnected())).answer(READY, NO_CALL)
    assert not caplog.records
