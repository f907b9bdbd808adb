"""From an error's code to a gRPC status, and the end of an RPC with it."""

from typing import Any, NoReturn

import grpc

from gateway.errors import Code, InferenceError

Context = grpc.aio.ServicerContext[Any, Any]

STATUS = {
    Code.UNKNOWN: grpc.StatusCode.UNKNOWN,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Code.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Code.CANCELLED: grpc.StatusCode.CANCELLED,
}
"""The v2 protocol's status for each code; every code has one."""

MAX_PLAIN_CHARS = 6144
MAX_CHARS = 512
"""grpc may refuse trailers beyond 8 KiB, and percent-encodes what is not printable ASCII: up to
twelve bytes for one character."""


async def abort(context: Context, error: InferenceError) -> NoReturn:
    """End the RPC with an error; a message longer than trailers can be is cut."""
    plain = error.message.isascii() and error.message.isprintable()
    limit = MAX_PLAIN_CHARS if plain else MAX_CHARS
    await context.abort(STATUS[error.code], error.message[:limit])
