"""How the bytes of an RPC reach its method, and how what the method raises reaches the client."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from gateway.errors import UNEXPECTED, InferenceError
from gateway.frontends.grpc.errors import Context, abort

log = logging.getLogger("sluice.grpc")

UNPARSABLE = "Unable to parse request"
"""Triton's text, with INTERNAL."""

Handler = Any
Parse = Callable[[bytes], Any]


class Methods:
    """Stands where a server does while services are added to it, and adds them to the server.

    Each unary method may raise InferenceError, and what cannot be parsed is refused: left to
    grpc, that would be a traceback in the log, and show Python's class of the exception to the
    client. The methods in `parsers` take what their parser makes of the bytes, and give bytes.
    """

    def __init__(self, server: grpc.aio.Server, parsers: Mapping[str, Parse]) -> None:
        self._server = server
        self._parsers = parsers

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The older form of the same handlers, which generated code adds as well."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Add a service's methods to the server."""
        added = {name: self._answering(name, handler) for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service, added)

    def _answering(self, name: str, handler: Handler) -> Handler:
        parse, serialize = handler.request_deserializer, handler.response_serializer
        if name in self._parsers:
            parse, serialize = self._parsers[name], None
        if handler.unary_unary is not None:
            answer = _unary(handler.unary_unary, parse, serialize)
            return grpc.unary_unary_rpc_method_handler(answer)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(handler.stream_stream, parse, serialize)
        return handler


def _unary(method: Any, parse: Parse, serialize: Callable[[Any], bytes] | None) -> Any:
    async def answer(data: bytes, context: Context) -> Any:
        try:
            response = await method(parse(data), context)
            return response if serialize is None else serialize(response)
        except InferenceError as error:
            await abort(context, error)
        except DecodeError:
            await context.abort(grpc.StatusCode.INTERNAL, UNPARSABLE)
        except (grpc.aio.AbortError, grpc.aio.BaseError):
            raise
        except Exception:
            # Around one request in a frontend: a defect of ours is logged, and the client learns
            # nothing of it.
            log.exception("request failed unexpectedly")
            await abort(context, UNEXPECTED)

    return answer
