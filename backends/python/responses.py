"""Responses as a worker writes them, and those of other models as it reads them."""

from typing import Any

from backends.python.tensors import TensorReader, TensorWriter
from gateway.errors import AnsweredError, Code, InferenceError
from gateway.messages import NO_PARAMETERS, InferResponse, Phases

CODES = {code.name: code for code in Code}


def read_response(
    found: list[Any], tensors: TensorReader, *, final: bool, phases: Phases | None = None
) -> InferResponse | InferenceError:
    """A response of the worker's, or the error it has in its place.

    One without outputs is never final, or it would be the flag alone: that comes after it.
    """
    outputs, error, parameters = found
    if error is not None:
        return AnsweredError(CODES.get(error[0], Code.INTERNAL), error[1])
    return InferResponse(
        outputs=tuple([tensors.read(each) for each in outputs]),
        parameters=parameters or NO_PARAMETERS,
        final=final and bool(outputs),
        phases=phases,
    )


def describe_response(response: InferResponse, tensors: TensorWriter) -> list[Any]:
    """`[outputs, error, parameters]` of another model's response."""
    outputs = [tensors.write(each) for each in response.outputs]
    return [outputs, None, dict(response.parameters)]
