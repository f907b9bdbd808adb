"""What becomes of a unary RPC whose request is no message of its type."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

UNPARSABLE = "Unable to parse request"
"""Triton's text, with INTERNAL."""

Continue = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class ParsingInterceptor(grpc.aio.ServerInterceptor):
    """Parses the requests of unary RPCs, and refuses what cannot be parsed.

    Left to grpc, each of them would be a traceback in the log, and show Python's class of the
    exception to the client.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}

    async def intercept_service(
        self, continuation: Continue, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, with the parsing in front of it."""
        method = handler_call_details.method
        if method not in self._handlers:
            handler = await continuation(handler_call_details)
            if handler is None or handler.unary_unary is None:
                return handler
            self._handlers[method] = _parsing(handler)
        return self._handlers[method]


def _parsing(handler: Any) -> Any:
    async def parse_and_answer(data: bytes, context: Any) -> Any:
        try:
            request = handler.request_deserializer(data)
        except DecodeError:
            await context.abort(grpc.StatusCode.INTERNAL, UNPARSABLE)
        return await handler.unary_unary(request, context)

    return grpc.unary_unary_rpc_method_handler(
        parse_and_answer, response_serializer=handler.response_serializer
    )
