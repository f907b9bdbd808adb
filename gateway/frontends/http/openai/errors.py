"""OpenAI's error objects: message, type, param and code."""

import orjson

from gateway.errors import Code, InferenceError
from gateway.frontends.http import errors
from gateway.frontends.http.errors import (
    shortened,
    status_of,
)
from gateway.openai_contract import OpenAiRefusal

STATUS = {**errors.STATUS, Code.ALREADY_EXISTS: 409, Code.CANCELLED: 499}
"""The status for each code: that of v2, with two exceptions."""

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
"""The `type` of an error by status, as in vLLM."""


def error_json(status: int, message: str, param: str | None = None) -> bytes:
    """The JSON of an error; `param` is the invalid member of the body, if there is one."""
    error = {
        "message": shortened(message),
        "type": TYPES.get(status, TYPES[400] if status < 500 else TYPES[500]),
        "param": param,
        "code": status,
    }
    return orjson.dumps({"error": error})


def refusal(code: Code, message: str, param: str) -> OpenAiRefusal:
    """An error for an invalid member of the body."""
    status = STATUS[code]
    return OpenAiRefusal(code, message, status=status, body=error_json(status, message, param))


def written(error: InferenceError) -> tuple[int, bytes]:
    """Status and JSON of an error; an error that the model wrote in OpenAI's form is unchanged."""
    if isinstance(error, OpenAiRefusal):
        return error.status, error.body
    status = status_of(error, STATUS)
    return status, error_json(status, error.message)
