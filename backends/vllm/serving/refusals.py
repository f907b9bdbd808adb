"""Errors of vLLM in OpenAI's form."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from jinja2 import TemplateError
from pydantic import ValidationError
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from backends.vllm.failures import MAX_TEXT, Failures, first_mistake, mistake_of
from backends.vllm.settings import hide_folders
from gateway.errors import Code, InferenceError
from gateway.openai_contract import OpenAiRefusal

FAILURES = (
    InferenceError,
    VLLMError,
    NotImplementedError,
    OverflowError,
    TemplateError,
    TypeError,
    ValueError,
    RuntimeError,
)
"""Errors that a handler raises for a request; any other error is a defect."""

STATED = (VLLMError, NotImplementedError)
"""Errors whose type has its own status in vLLM."""

UNREADABLE = (*FAILURES, LookupError, AttributeError)
"""Errors of reading a body: vLLM's validators do not check all types first."""

CODES = {
    HTTPStatus.BAD_REQUEST: Code.INVALID_ARG,
    HTTPStatus.UNPROCESSABLE_ENTITY: Code.INVALID_ARG,
    HTTPStatus.NOT_FOUND: Code.NOT_FOUND,
    HTTPStatus.CONFLICT: Code.ALREADY_EXISTS,
    HTTPStatus.NOT_IMPLEMENTED: Code.UNSUPPORTED,
    HTTPStatus.SERVICE_UNAVAILABLE: Code.UNAVAILABLE,
}
"""The code of each HTTP status of vLLM; INTERNAL for all others."""


class Refusals:
    """Translates errors of one model into OpenAI's form, without paths of the host."""

    def __init__(self, failures: Failures, folders: Mapping[str, str]) -> None:
        self._failures = failures
        self._folders = folders

    def unreadable(self, error: Exception) -> InferenceError:
        """For one of `UNREADABLE`: the mistake of a body and its place, as in vLLM's server."""
        if isinstance(error, InferenceError | VLLMError | ValidationError):
            return self.explain(error)
        reason = f"a member of it has the wrong type, or lacks a part: {first_mistake(error)}"
        return self.written(create_error_response(f"the request is malformed, {reason}"))

    def explain(self, error: Exception, *, begun: bool = True) -> InferenceError:
        """For one of `FAILURES`; `begun` is true if the engine has made an output."""
        if isinstance(error, EngineDeadError):
            return self._failures.explain(error)
        if isinstance(error, InferenceError):
            return error
        if isinstance(error, ValidationError):
            return self.written(_invalid_body(error))
        if isinstance(error, RuntimeError) and not (begun or isinstance(error, STATED)):
            # Before the first output the request could not be prepared.
            return self.written(create_error_response(str(error)))
        return self.written(create_error_response(error))

    def written(self, answer: ErrorResponse) -> OpenAiRefusal:
        """For an error in the answer of a handler."""
        answer.error.message = self._clean(answer.error.message)
        return _refusal(answer.model_dump(), encode(answer.model_dump()))

    def streamed(self, chunk: str) -> OpenAiRefusal:
        """For an error in a chunk of a stream; its bytes are kept but for paths."""
        answer = orjson.loads(chunk)
        answer["error"]["message"] = hide_folders(answer["error"]["message"], self._folders)
        return _refusal(answer, json.dumps(answer).encode())

    def _clean(self, message: str) -> str:
        message = hide_folders(message, self._folders)
        return message if len(message) <= MAX_TEXT else f"{message[:MAX_TEXT]}..."


def encode(answer: Any) -> bytes:
    """JSON with the bytes of vLLM's server."""
    return json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _refusal(answer: Mapping[str, Any], body: bytes) -> OpenAiRefusal:
    error = answer["error"]
    code = CODES.get(error["code"], Code.INTERNAL)
    return OpenAiRefusal(code, error["message"], status=error["code"], body=body)


def _invalid_body(error: ValidationError) -> ErrorResponse:
    mistakes = error.errors(include_url=False, include_input=False)
    causes = (mistake.get("ctx", {}).get("error") for mistake in mistakes)
    named = [each.parameter for each in causes if isinstance(each, VLLMValidationError)]
    message, found = mistake_of(error)
    place = named[0] if named else found
    if place and not message.endswith(")"):
        message = f"{message} (at {place})"
    return create_error_response(
        message, err_type=HTTPStatus.BAD_REQUEST.phrase, param=place or None
    )
