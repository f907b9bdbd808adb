"""From an error's code to an HTTP status and body."""

import logging
from collections.abc import Mapping

import orjson
from starlette.responses import Response

from gateway.errors import Code, InferenceError
from gateway.resumption.idempotency import KeyReused

log = logging.getLogger("sluice.http")

JSON = "application/json"
RETRY_AFTER_SECS = "1"
MAX_LOGGED = 2000
"""Characters of a reason that are logged: what a client has sent may make it as long as that."""

MAX_MESSAGE = 4096
"""Characters of a message that are sent: what a client has sent may be repeated in it."""

STATUS = {
    Code.UNKNOWN: 400,
    Code.INTERNAL: 500,
    Code.NOT_FOUND: 404,
    Code.INVALID_ARG: 400,
    Code.UNAVAILABLE: 503,
    Code.UNSUPPORTED: 501,
    Code.ALREADY_EXISTS: 400,
    Code.CANCELLED: 400,
}
"""The v2 protocol's status for each code; every code has one."""
KEY_REUSED = 422
"""Idempotency-Key HTTP header field, draft 06, section 2.7: another request had the key."""


def error_body(message: str) -> bytes:
    """The body of every error on every v2 endpoint; of a very long message without the middle."""
    return orjson.dumps({"error": shortened(message)})


def shortened(message: str) -> str:
    """The message, of a very long one without the middle."""
    half = MAX_MESSAGE // 2
    return message if len(message) <= MAX_MESSAGE else f"{message[:half]}...{message[-half:]}"


def refused(path: str, error: InferenceError) -> Response:
    """The answer to a request that has failed, which is logged."""
    log_refusal(path, error)
    return error_response(error)


def log_refusal(path: str, error: InferenceError) -> None:
    """One line for a request that has failed."""
    reason = error.message[:MAX_LOGGED]
    log.warning("request refused", extra={"path": path, "code": error.code.name, "reason": reason})


def error_response(error: InferenceError) -> Response:
    """An error before any part of an answer has been sent."""
    return plain_error(status_of(error, STATUS), error.message, retry_after(error))


def retry_after(error: InferenceError) -> dict[str, str]:
    """The header that asks a client to try again, where that may help."""
    return {"Retry-After": RETRY_AFTER_SECS} if error.code is Code.UNAVAILABLE else {}


def status_of(error: InferenceError, statuses: Mapping[Code, int]) -> int:
    """The status of an error, by its code if it has none of its own."""
    return KEY_REUSED if isinstance(error, KeyReused) else statuses[error.code]


def plain_error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error that only HTTP knows, such as 404 for a path without a route."""
    return Response(error_body(message), status, headers, media_type=JSON)
