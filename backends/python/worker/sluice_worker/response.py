"""Responses as model.py makes and reads them."""

from collections.abc import Iterable
from typing import Any

from .errors import TritonError, TritonModelException
from .parameters import checked, text
from .tensor import Tensor


class InferenceResponse:
    """Outputs, or the error of one request; parameters go to the client."""

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
        """The error, None if there is none."""
        return self._error

    def parameters(self) -> str:
        """Its parameters as JSON text."""
        return text(self.given_parameters)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """An output by its name, None if there is none."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


def _check_output(output: Any) -> None:
    if output is None:
        raise TritonModelException("Output tensor for inference response should not be empty.")
    if not isinstance(output, Tensor):
        raise TypeError(f"output_tensors must be Tensors, found {type(output)}")
