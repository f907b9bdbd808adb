"""What stands before a method: its bytes, its errors, and what the client learns of a defect."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.methods import UNPARSABLE, Methods
from gateway.protos import grpc_service_pb2 as pb

READY = pb.ModelReadyRequest(name="m").SerializeToString()
Method = Callable[[Any, Any], Awaitable[Any]]


class Server:
    """Keeps the handlers that are added to it."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.handlers.update(handlers)


class Aborted(grpc.aio.AbortError):
    """The end of an RPC."""


class Context:
    """Notes how an RPC ended."""

    def __init__(self) -> None:
        self.ended: tuple[grpc.StatusCode, str] | None = None

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.ended = (code, details)
        raise Aborted


def added(method: Method, parsers: Mapping[str, Any] | None = None) -> Any:
    server: Any = Server()
    handler = grpc.unary_unary_rpc_method_handler(
        method, pb.ModelReadyRequest.FromString, pb.ModelReadyResponse.SerializeToString
    )
    Methods(server, parsers or {}).add_registered_method_handlers("s", {"ModelReady": handler})
    return server.handlers["ModelReady"]


async def ending(method: Method, data: bytes = READY) -> tuple[grpc.StatusCode, str] | None:
    context = Context()
    with pytest.raises(Aborted):
        await added(method).unary_unary(data, context)
    return context.ended


async def answer(request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
    return pb.ModelReadyResponse(ready=request.name == "m")


def raising(error: Exception) -> Method:
    async def method(request: Any, context: Any) -> None:
        raise error

    return method


async def test_a_method_takes_and_gives_messages() -> None:
    handler = added(answer)
    assert handler.request_deserializer is None
    assert handler.response_serializer is None
    data = await handler.unary_unary(READY, Context())
    assert pb.ModelReadyResponse.FromString(data).ready


async def test_a_method_with_a_parser_gives_bytes() -> None:
    async def reverse(data: bytes, context: Any) -> bytes:
        return data[::-1]

    handler = added(reverse, {"ModelReady": bytes.upper})
    assert await handler.unary_unary(b"abc", Context()) == b"CBA"


async def test_what_cannot_be_parsed_is_refused() -> None:
    assert await ending(answer, b"\xff") == (grpc.StatusCode.INTERNAL, UNPARSABLE)


async def test_an_error_becomes_the_status() -> None:
    error = InferenceError(Code.NOT_FOUND, "no such model")
    assert await ending(raising(error)) == (grpc.StatusCode.NOT_FOUND, "no such model")


@pytest.mark.parametrize(("character", "kept"), [("a", 6144), ("ü", 512), ("\n", 512)])
async def test_a_long_message_is_cut(character: str, kept: int) -> None:
    error = InferenceError(Code.INVALID_ARG, character * 10_000)
    found = await ending(raising(error))
    assert found == (grpc.StatusCode.INVALID_ARGUMENT, character * kept)


async def test_a_defect_is_logged_once_and_tells_the_client_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        found = await ending(raising(KeyError("/secret/path")))
    assert found == (grpc.StatusCode.INTERNAL, "internal error; the server's log says why")
    (record,) = caplog.records
    assert record.exc_info is not None


async def test_a_method_may_end_the_rpc_itself() -> None:
    async def method(request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")

    assert await ending(method) == (grpc.StatusCode.UNIMPLEMENTED, "not here")
