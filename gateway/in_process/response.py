"""A response as a program gets it: outputs as numpy arrays."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from gateway.errors import InferenceError
from gateway.in_process.arrays import to_array
from gateway.messages import InferResponse, Parameter, Usage
from gateway.stream import INTERRUPTED


@dataclass(frozen=True, slots=True)
class Response:
    """One response to a request, with the names of Triton's in-process API.

    `outputs` are read-only arrays by name: views of what the model made where numpy has the
    datatype, objects of type bytes for BYTES, float32 for BF16. `final` says that no more will
    come; `usage` has the tokens that an LLM's response adds. A response with an `error` has no
    outputs, and more may follow: an error that ends its request is raised instead.
    """

    request_id: str
    outputs: Mapping[str, npt.NDArray[Any]]
    parameters: Mapping[str, Parameter]
    final: bool
    usage: Usage | None = None
    error: InferenceError | None = None


def responses_of(answers: Iterable[InferResponse], request_id: str) -> list[Response]:
    """The responses that say something: a final flag that comes alone ends the iterator instead."""
    return [
        Response(
            request_id,
            {tensor.name: to_array(tensor) for tensor in answer.outputs},
            answer.parameters,
            answer.final,
            answer.usage,
            answer.error,
        )
        for answer in answers
        if answer.outputs or not answer.final or answer == INTERRUPTED
    ]
