"""From an error's code to a gRPC status, and to the error that ends an RPC."""

from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.rpc import RpcError, Status

STATUS = {
    Code.UNKNOWN: Status.UNKNOWN,
    Code.INTERNAL: Status.INTERNAL,
    Code.NOT_FOUND: Status.NOT_FOUND,
    Code.INVALID_ARG: Status.INVALID_ARGUMENT,
    Code.UNAVAILABLE: Status.UNAVAILABLE,
    Code.UNSUPPORTED: Status.UNIMPLEMENTED,
    Code.ALREADY_EXISTS: Status.ALREADY_EXISTS,
    Code.CANCELLED: Status.CANCELLED,
}
"""The v2 protocol's status for each code; every code has one."""

MAX_PLAIN_CHARS = 6144
MAX_CHARS = 512
"""Clients may refuse trailers beyond 8 KiB, and what is not printable ASCII is percent-encoded: up
to twelve bytes for one character."""


def rpc_error(error: InferenceError) -> RpcError:
    """Ends an RPC as an error says; a message longer than trailers can be is cut."""
    plain = error.message.isascii() and error.message.isprintable()
    limit = MAX_PLAIN_CHARS if plain else MAX_CHARS
    return RpcError(STATUS[error.code], error.message[:limit])
