"""Encoding of errors between processes of Sluice, as MessagePack; see `inference_messages`."""

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.errors import (
    AnsweredError,
    Code,
    InferenceError,
    Refusal,
    RefusalReason,
    RefusedError,
    RetryAdvice,
    RetryLater,
)
from gateway.openai_contract import OpenAiRefusal
from gateway.processes.malformed import UNREADABLE, malformed

LARGEST_STATUS = 599
NAMED = frozenset(RefusalReason) - {RefusalReason.OVERLOADED}
"""The reasons of refusals other than RetryLater."""
OVERLOADED = str(RefusalReason.OVERLOADED)


class ErrorMessage(msgspec.Struct, array_like=True, gc=False):
    """An error, as its own message or in a response."""

    code: Code
    message: str
    status: Annotated[int, Meta(ge=0, le=LARGEST_STATUS)] = 0
    body: bytes = b""
    answered: bool = False
    refused: bool = False
    dead_instance: Annotated[int, Meta(ge=0)] | None = None
    retry_secs: Annotated[int, Meta(ge=0)] = 0
    lacks_instance: bool = False
    refusal: str = ""
    retry_after_secs: Annotated[float, Meta(ge=0)] = 0.0
    retries: bool = True
    predicted_wait_secs: Annotated[float, Meta(ge=0)] | None = None
    limit: str = ""
    after_steps: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ErrorMessage).decode


def write_error(error: InferenceError) -> bytes:
    """An error as bytes, with its OpenAI form if it has one."""
    return _encode(written_error(error))


def read_error(payload: bytes) -> InferenceError:
    """The error that `write_error` encoded; another one for other bytes."""
    try:
        found = _decode(payload)
    except UNREADABLE as error:
        return malformed("error", payload, error)
    return error_of(found)


def written_error(error: InferenceError) -> ErrorMessage:
    """The message of an error."""
    # UTF-8 has no lone surrogates, which names of a client may have.
    message = error.message.encode("utf-8", "replace").decode()
    if isinstance(error, OpenAiRefusal):
        return ErrorMessage(error.code, message, error.status, error.body)
    if isinstance(error, Refusal):
        return _written_refusal(error, message)
    return ErrorMessage(
        error.code,
        message,
        answered=isinstance(error, AnsweredError),
        refused=isinstance(error, RefusedError),
        dead_instance=error.dead_instance,
        lacks_instance=error.lacks_instance,
    )


def _written_refusal(error: Refusal, message: str) -> ErrorMessage:
    """The message of a refusal; an earlier release reads it as a RetryLater.

    Unless the model lacks an instance, which that release reads of others.
    """
    advice = error.advice
    return ErrorMessage(
        error.code,
        message,
        refused=True,
        retry_secs=0 if error.lacks_instance else math.ceil(advice.retry_after_secs),
        lacks_instance=error.lacks_instance,
        refusal=error.refusal_reason,
        retry_after_secs=advice.retry_after_secs,
        retries=advice.retries,
        predicted_wait_secs=advice.predicted_wait_secs,
        limit=advice.limit,
        after_steps=error.after_steps,
    )


def error_of(found: ErrorMessage) -> InferenceError:
    """The error of a message."""
    if found.status:
        return OpenAiRefusal(found.code, found.message, status=found.status, body=found.body)
    error: InferenceError
    if found.refusal in NAMED:
        error = _refusal(found)
    elif found.refusal == OVERLOADED or found.retry_secs:
        error = RetryLater(found.message, found.retry_after_secs or found.retry_secs)
    else:
        error = _kind(found)(found.code, found.message)
    error.dead_instance = found.dead_instance
    error.lacks_instance = found.lacks_instance
    error.after_steps = found.after_steps
    return error


def _refusal(found: ErrorMessage) -> Refusal:
    advice = RetryAdvice(
        retry_after_secs=found.retry_after_secs,
        retries=found.retries,
        predicted_wait_secs=found.predicted_wait_secs,
        limit=found.limit,
    )
    return Refusal(RefusalReason(found.refusal), found.message, advice)


def _kind(found: ErrorMessage) -> type[InferenceError]:
    if found.refused:
        return RefusedError
    return AnsweredError if found.answered else InferenceError
