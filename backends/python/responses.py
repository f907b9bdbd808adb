"""Responses as a worker writes them, and those of other models as it reads them."""

import logging
from typing import Any

from backends.python.tensors import TensorReader, TensorWriter
from gateway.errors import AnsweredError, Code, InferenceError
from gateway.messages import NO_PARAMETERS, InferResponse, Phases

log = logging.getLogger("sluice.python")

CODES = {code.name: code for code in Code}


def read_response(
    found: list[Any], tensors: TensorReader, *, final: bool, phases: Phases | None = None
) -> InferResponse | InferenceError:
    """A response of the worker's, or the error that ends its request in place of a response.

    One without outputs is never final, or it would be the flag alone: that comes after it. More
    responses may follow an error that is not final, as on Triton.
    """
    outputs, error, parameters = found
    if error is not None:
        failure = AnsweredError(CODES.get(error[0], Code.INTERNAL), error[1])
        return failure if final else InferResponse(error=failure, phases=phases)
    before = tensors.shared_bytes
    return InferResponse(
        outputs=tuple([tensors.read(each) for each in outputs]),
        shared_bytes=tensors.shared_bytes - before,
        parameters=parameters or NO_PARAMETERS,
        final=final and bool(outputs),
        phases=phases,
    )


def describe_response(response: InferResponse, tensors: TensorWriter) -> list[Any]:
    """`[outputs, error, parameters]` of another model's response."""
    if response.error is not None:
        return describe_error(response.error)
    outputs = [tensors.write(each) for each in response.outputs]
    return [outputs, None, dict(response.parameters)]


def expected(error: Exception, failed: str) -> InferenceError:
    """The error as a model gets it; INTERNAL for an exception without a code, which is logged."""
    if isinstance(error, InferenceError):
        return error
    log.error("request of a Python model failed unexpectedly", exc_info=error)
    return InferenceError(Code.INTERNAL, f"{failed} failed unexpectedly; the server's log says why")


def describe_error(error: InferenceError) -> list[Any]:
    """The same of an error in place of a response."""
    return [[], [error.code.name, error.message], {}]
