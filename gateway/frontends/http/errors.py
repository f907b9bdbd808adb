"""HTTP statuses, bodies and log lines of errors, in the forms of v2 and of OpenAI."""

import asyncio
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import Code, InferenceError, Refusal, RefusalReason, unexpected
from gateway.observability.escaping import escaped_json
from gateway.observability.request_context import current_request
from gateway.openai_contract import OpenAiRefusal
from gateway.resumption.recording import KeyReused

log = logging.getLogger("sluice.http")

JSON = "application/json"
RETRY_AFTER_SECS = "1"
SHOULD_RETRY = "X-Should-Retry"
"""The header of each Refusal by which OpenAI's clients retry, or do not."""
CLOSING: Mapping[str, str] = MappingProxyType({"Connection": "close"})
"""The header of an answer behind which the connection closes."""
LINGER_SECS = 5.0
"""The time in which the rest of a refused request is dropped."""
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

OPENAI_STATUS = {**STATUS, Code.ALREADY_EXISTS: 409, Code.CANCELLED: 499}
"""The status of OpenAI's endpoints for each code: that of v2, with two exceptions."""

OPENAI_TYPES = {
    400: "BadRequestError",
    401: "invalid_request_error",
    403: "permission_error",
    404: "NotFoundError",
    409: "ConflictError",
    422: "UnprocessableEntityError",
    499: "ClientClosedRequestError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
"""The `type` of OpenAI's errors by status, as in vLLM; 401 and 403 as OpenAI's own."""
OPENAI_CODES: Mapping[int, str] = {401: "invalid_api_key", 403: "forbidden"}
"""The `code` of these; that of others is the status."""

REFUSAL_STATUS = {
    RefusalReason.RATE_LIMITED: 429,
    RefusalReason.OVERLOADED: 503,
    RefusalReason.DEADLINE_UNREACHABLE: 503,
    RefusalReason.DEADLINE_EXCEEDED: 504,
}
"""The status of a Refusal, on every endpoint."""
OPENAI_REFUSALS = {
    RefusalReason.RATE_LIMITED: ("requests", "rate_limit_exceeded"),
    RefusalReason.OVERLOADED: ("server_error", "server_overloaded"),
    RefusalReason.DEADLINE_UNREACHABLE: ("server_error", "deadline_unreachable"),
    RefusalReason.DEADLINE_EXCEEDED: ("server_error", "deadline_exceeded"),
}
"""The `type` and the `code` of a Refusal in OpenAI's form."""
TOKENS = "tokens"
"""The limit of tenants that is a `type` of its own."""
LOGGED_BY_ADMISSION = frozenset({RefusalReason.RATE_LIMITED, RefusalReason.DEADLINE_UNREACHABLE})
"""Reasons of refusals that come in floods: the admission logs one line a second of a tenant."""

KEY_REUSED = 422
"""For a key that another request has used (Idempotency-Key header field, draft 06, 2.7)."""


def error_body(message: str) -> bytes:
    """The body of every error on every v2 endpoint."""
    return escaped_json({"error": shortened(message)}).encode()


def shortened(message: str) -> str:
    """The message; the middle of one beyond MAX_MESSAGE is left out."""
    half = MAX_MESSAGE // 2
    return message if len(message) <= MAX_MESSAGE else f"{message[:half]}...{message[-half:]}"


def refused(path: str, error: InferenceError) -> Response:
    """Log a failed request, and return its response."""
    log_refusal(path, error)
    return error_response(error)


def failed(path: str, error: Exception) -> Response:
    """The response to a request that failed; an unexpected error is in the log alone."""
    if isinstance(error, InferenceError):
        return refused(path, error)
    log.error("request failed unexpectedly", exc_info=error)
    return error_response(unexpected())


def log_refusal(path: str, error: InferenceError) -> None:
    """Log one line for a failed request unless the admission logs it, and note its error."""
    if (request := current_request()) is not None:
        request.note(error)
    if isinstance(error, Refusal) and error.refusal_reason in LOGGED_BY_ADMISSION:
        return
    reason = error.message[:MAX_LOGGED]
    log.warning("request refused", extra={"path": path, "code": error.code.name, "reason": reason})


def error_response(error: InferenceError) -> Response:
    """The response for an error before any part of a response was sent."""
    return plain_error(status_of(error, STATUS), error.message, error_headers(error))


def error_headers(error: InferenceError) -> dict[str, str]:
    """Retry-After where a retry may succeed, and the further headers of a Refusal."""
    if isinstance(error, Refusal):
        return _refusal_headers(error)
    return {"Retry-After": RETRY_AFTER_SECS} if error.code is Code.UNAVAILABLE else {}


def _refusal_headers(error: Refusal) -> dict[str, str]:
    advice = error.advice
    found = {**advice.headers, "X-Refused-Reason": str(error.refusal_reason)}
    found[SHOULD_RETRY] = "true" if advice.retries else "false"
    if advice.retries and advice.retry_after_secs:
        found["Retry-After"] = str(math.ceil(advice.retry_after_secs))
        found["Retry-After-Ms"] = str(math.ceil(advice.retry_after_secs * 1000))
    if advice.predicted_wait_secs is not None:
        found["X-Predicted-Wait-Ms"] = str(round(advice.predicted_wait_secs * 1000))
    return found


def status_of(error: InferenceError, statuses: Mapping[Code, int]) -> int:
    """The status of an error: by its code, or its own."""
    if isinstance(error, Refusal):
        return REFUSAL_STATUS[error.refusal_reason]
    return KEY_REUSED if isinstance(error, KeyReused) else statuses[error.code]


def plain_error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error of HTTP's own, such as 404 for a path without a route."""
    return json_answer(error_body(message), status, headers or {})


def json_answer(body: bytes, status: int, headers: Mapping[str, str]) -> Response:
    """The response with the JSON of an error."""
    kind = ClosingResponse if CLOSING.keys() <= headers.keys() else Response
    return kind(body, status, headers, media_type=JSON)


class ClosingResponse(Response):
    """A response to a request whose body is not read, and the last one of its connection.

    The client has all of it before the connection closes: the rest of its body is dropped for
    LINGER_SECS at most. A reset by unread bytes could take the response away (RFC 9112, 9.6).
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, headers = self.status_code, self.raw_headers
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if (logged := current_request()) is not None:
            logged.answered_unread()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECS):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b""})


def openai_error_body(status: int, message: str, param: str | None = None) -> bytes:
    """The JSON of an error in OpenAI's form; `param` is the invalid member of the body, if any."""
    kind = OPENAI_TYPES.get(status, OPENAI_TYPES[400] if status < 500 else OPENAI_TYPES[500])
    return _openai_body(message, kind, param, OPENAI_CODES.get(status, status))


def _openai_body(message: str, kind: str, param: str | None, code: str | int) -> bytes:
    error = {"message": shortened(message), "type": kind, "param": param, "code": code}
    return escaped_json({"error": error}).encode()


def openai_refusal(code: Code, message: str, param: str) -> OpenAiRefusal:
    """An error in OpenAI's form, for an invalid member of the body."""
    status = OPENAI_STATUS[code]
    return OpenAiRefusal(
        code, message, status=status, body=openai_error_body(status, message, param)
    )


def openai_form(error: InferenceError) -> tuple[int, bytes]:
    """Status and JSON of an error in OpenAI's form; one that the model wrote so is unchanged."""
    if isinstance(error, OpenAiRefusal):
        return error.status, error.body
    status = status_of(error, OPENAI_STATUS)
    if isinstance(error, Refusal):
        kind, code = OPENAI_REFUSALS[error.refusal_reason]
        kind = TOKENS if error.advice.limit == TOKENS else kind
        return status, _openai_body(error.message, kind, None, code)
    return status, openai_error_body(status, error.message)
