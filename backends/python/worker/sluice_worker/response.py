"""Responses as model.py makes and reads them, and the parameters of requests and responses."""

import json
from collections.abc import Iterable
from typing import Any

from .errors import TritonError, TritonModelException
from .tensor import Tensor


def checked(parameters: Any) -> dict[str, Any] | None:
    """A checked copy; TritonModelException names a value that cannot be a parameter."""
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(key)}"
            )
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise TritonModelException(f"Parameter '{key}' is {value}, which 64 bits cannot hold")
    return dict(parameters) or None


def text(parameters: dict[str, Any] | None) -> str:
    """Parameters of model.py as JSON text; "" for none."""
    return json.dumps(parameters) if parameters else ""


def client_text(parameters: dict[str, Any]) -> str:
    """Parameters of a client as JSON text, in the form of Triton's server."""
    return json.dumps(parameters, separators=(",", ":"), ensure_ascii=False)


class InferenceResponse:
    """The outputs or the error of one request; parameters go to the client."""

    __slots__ = ("_error", "_outputs", "given_parameters")

    def __init__(
        self,
        output_tensors: Iterable[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        outputs = list(output_tensors)
        for each in outputs:
            _check_output(each)
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error must be a TritonError, found {type(error)}")
        self._outputs = [] if error is not None else outputs
        self._error = error
        self.given_parameters = checked(parameters)

    def output_tensors(self) -> list[Tensor]:
        """Its outputs."""
        return self._outputs

    def has_error(self) -> bool:
        """Whether there is an error instead of outputs."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, if any."""
        return self._error

    def parameters(self) -> str:
        """Its parameters as JSON text."""
        return text(self.given_parameters)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """An output by its name; None without one."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


def _check_output(output: Any) -> None:
    if output is None:
        raise TritonModelException("Output tensor for inference response should not be empty.")
    if not isinstance(output, Tensor):
        raise TypeError(f"output_tensors must be Tensors, found {type(output)}")
