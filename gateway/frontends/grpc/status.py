"""Status codes and errors of RPCs, and the status of each error of a request."""

import asyncio
from collections.abc import Sequence
from enum import IntEnum

from gateway.errors import Code, InferenceError, Refusal, RefusalReason
from gateway.frontends.grpc import refusals

Metadata = Sequence[tuple[str, str | bytes]]
"""Pairs of a lower-case name and a value: text, or bytes if the name ends in `-bin`."""


class StatusCode(IntEnum):
    """Status codes with the numbers of `grpc-status` (gRPC, status codes)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class RpcError(Exception):
    """Ends an RPC with a status other than OK and a text for the client.

    `trailers` are sent after the metadata of the method; all of it after `wait_secs`.
    """

    def __init__(
        self,
        status: StatusCode,
        details: str = "",
        trailers: Metadata = (),
        wait_secs: float = 0.0,
    ) -> None:
        super().__init__(details)
        self.status = status
        self.details = details
        self.trailers = trailers
        self.wait_secs = wait_secs

    async def due(self) -> None:
        """Wait until it may be sent."""
        if self.wait_secs:
            await asyncio.sleep(self.wait_secs)


STATUS = {
    Code.UNKNOWN: StatusCode.UNKNOWN,
    Code.INTERNAL: StatusCode.INTERNAL,
    Code.NOT_FOUND: StatusCode.NOT_FOUND,
    Code.INVALID_ARG: StatusCode.INVALID_ARGUMENT,
    Code.UNAVAILABLE: StatusCode.UNAVAILABLE,
    Code.UNSUPPORTED: StatusCode.UNIMPLEMENTED,
    Code.ALREADY_EXISTS: StatusCode.ALREADY_EXISTS,
    Code.CANCELLED: StatusCode.CANCELLED,
}
"""The status of each code of an InferenceError (v2 protocol)."""
REFUSAL_STATUS = {
    RefusalReason.RATE_LIMITED: StatusCode.RESOURCE_EXHAUSTED,
    RefusalReason.OVERLOADED: StatusCode.UNAVAILABLE,
    RefusalReason.DEADLINE_UNREACHABLE: StatusCode.UNAVAILABLE,
    RefusalReason.DEADLINE_EXCEEDED: StatusCode.DEADLINE_EXCEEDED,
}
"""The status of a Refusal."""

MAX_PLAIN_CHARS, MAX_CHARS = 6144, 512
"""Limits of an error text: clients may refuse trailers above 8 KiB, and percent-encoding turns one
character into up to twelve bytes."""


def rpc_error(error: InferenceError) -> RpcError:
    """The RpcError of an InferenceError; its text is cut to the limit of trailers."""
    if isinstance(error, Refusal):
        return _refused(error)
    plain = error.message.isascii() and error.message.isprintable()
    limit = MAX_PLAIN_CHARS if plain else MAX_CHARS
    return RpcError(STATUS[error.code], error.message[:limit])


def _refused(error: Refusal) -> RpcError:
    """As `rpc_error`; the text of a refusal is in its trailers, too."""
    plain = error.message.isascii() and error.message.isprintable()
    text = error.message[: MAX_PLAIN_CHARS // 6 if plain else MAX_CHARS // 2]
    status = REFUSAL_STATUS[error.refusal_reason]
    return RpcError(status, text, refusals.trailers(error, status, text))
