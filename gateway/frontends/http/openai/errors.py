"""Errors as OpenAI's clients read them: an object with message, type, param and code."""

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import Code, InferenceError
from gateway.frontends.http import errors
from gateway.frontends.http.errors import (
    JSON,
    RETRY_AFTER_SECS,
    log_refusal,
    shortened,
    status_of,
)
from gateway.frontends.http.openai.request_id import request_id_header
from gateway.openai_exchange import OpenAiRefusal

STATUS = {**errors.STATUS, Code.ALREADY_EXISTS: 409, Code.CANCELLED: 499}
"""The status for each code: mostly that of v2."""

TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    409: "ConflictError",
    422: "UnprocessableEntityError",
    499: "ClientClosedRequestError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
"""What vLLM calls an error of that status, where it has one."""

SERVICE_UNAVAILABLE = 503


def error_json(status: int, message: str, param: str | None = None) -> bytes:
    """The JSON of an error; `param` is the member of the body that is wrong, if it is one."""
    error = {
        "message": shortened(message),
        "type": TYPES.get(status, TYPES[400] if status < 500 else TYPES[500]),
        "param": param,
        "code": status,
    }
    return orjson.dumps({"error": error})


def refusal(code: Code, message: str, param: str) -> OpenAiRefusal:
    """An error that names the member of the body that is wrong."""
    status = STATUS[code]
    return OpenAiRefusal(code, message, status=status, body=error_json(status, message, param))


def written(error: InferenceError) -> tuple[int, bytes]:
    """Status and JSON of an error; those of a model that speaks OpenAI's as they are."""
    if isinstance(error, OpenAiRefusal):
        return error.status, error.body
    status = status_of(error, STATUS)
    return status, error_json(status, error.message)


def openai_refused(request: Request, error: InferenceError) -> Response:
    """The answer to a request that has failed, which is logged."""
    log_refusal(request.url.path, error)
    return openai_error(request, *written(error))


def openai_error(request: Request, status: int, body: bytes) -> Response:
    """An error in place of an answer."""
    headers = request_id_header(request)
    if status == SERVICE_UNAVAILABLE:
        headers["Retry-After"] = RETRY_AFTER_SECS
    return Response(body, status, headers, media_type=JSON)
