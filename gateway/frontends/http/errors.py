"""HTTP statuses, bodies and log lines of errors."""

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
"""Characters of a reason that are logged; a reason may repeat a client's input."""

MAX_MESSAGE = 4096
"""Characters of a message that are sent; a message may repeat a client's input."""

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
"""The v2 protocol's status for each code."""
KEY_REUSED = 422
"""For a key that another request has used (Idempotency-Key header field, draft 06, 2.7)."""


def error_body(message: str) -> bytes:
    """The body of every error on every v2 endpoint."""
    return orjson.dumps({"error": shortened(message)})


def shortened(message: str) -> str:
    """The message; the middle of one beyond MAX_MESSAGE is left out."""
    half = MAX_MESSAGE // 2
    return message if len(message) <= MAX_MESSAGE else f"{message[:half]}...{message[-half:]}"


def refused(path: str, error: InferenceError) -> Response:
    """Log a failed request, and return its response."""
    log_refusal(path, error)
    return error_response(error)


def log_refusal(path: str, error: InferenceError) -> None:
    """Log one line for a failed request."""
    reason = error.message[:MAX_LOGGED]
    log.warning("request refused", extra={"path": path, "code": error.code.name, "reason": reason})


def error_response(error: InferenceError) -> Response:
    """The response for an error before any part of a response was sent."""
    return plain_error(status_of(error, STATUS), error.message, retry_after(error))


def retry_after(error: InferenceError) -> dict[str, str]:
    """Retry-After where a retry may succeed."""
    return {"Retry-After": RETRY_AFTER_SECS} if error.code is Code.UNAVAILABLE else {}


def status_of(error: InferenceError, statuses: Mapping[Code, int]) -> int:
    """The status of an error: by its code, or its own."""
    return KEY_REUSED if isinstance(error, KeyReused) else statuses[error.code]


def plain_error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error of HTTP's own, such as 404 for a path without a route."""
    return Response(error_body(message), status, headers, media_type=JSON)
