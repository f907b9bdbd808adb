"""Shapes of tensors: `reshape` of a config, and agreement of a config with its model."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import Tensor, format_shape

Shape = tuple[int, ...]
ANY_SIZE = -1


@dataclass(frozen=True, slots=True)
class Reshape:
    """A reshape of tensors from `before` to `after`, after a batch dimension if `batching`.

    Variable dimensions keep their sizes in their order.
    """

    before: Shape
    after: Shape
    batching: bool

    @property
    def reverse(self) -> "Reshape":
        """The reshape from `after` to `before`."""
        return Reshape(self.after, self.before, self.batching)

    def shape(self, found: Shape) -> Shape | None:
        """The new shape; None if it has another number of elements.

        As on Triton, fixed dimensions of `before` are not compared with those found.
        """
        dims = found[self.batching :]
        at = [place for place, dim in enumerate(self.before) if dim == ANY_SIZE]
        if at and at[-1] >= len(dims):
            return None
        sizes = iter([dims[place] for place in at])
        after = [next(sizes) if dim == ANY_SIZE else dim for dim in self.after]
        shape = (*found[: self.batching], *after)
        return shape if math.prod(shape) == math.prod(found) else None


class Reshapes:
    """The reshapes of one model's inputs and outputs; false if it has none."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._inputs = {
            each.name: Reshape(each.dims, each.reshape.shape, config.batching)
            for each in config.input
            if each.reshape is not None
        }
        self._outputs = {
            each.name: Reshape(each.reshape.shape, each.dims, config.batching)
            for each in config.output
            if each.reshape is not None
        }

    def __bool__(self) -> bool:
        return bool(self._inputs or self._outputs)

    def towards_model(self, request: InferRequest) -> InferRequest:
        """The request with the model's shapes; data is not copied."""
        if not self._inputs:
            return request
        return replace(request, inputs=self._reshaped(request.inputs, self._inputs))

    def towards_client(self, response: InferResponse) -> InferResponse:
        """The response with the config's shapes; data is not copied.

        Raises INTERNAL for an output with another number of elements than the config's shape.
        """
        if not (self._outputs and response.outputs):
            return response
        return replace(response, outputs=self._reshaped(response.outputs, self._outputs))

    def as_made(self, response: InferResponse) -> tuple[Tensor, ...]:
        """The outputs of a response with the model's shapes, which states have."""
        if not self._outputs:
            return response.outputs
        back = {name: each.reverse for name, each in self._outputs.items()}
        return self._reshaped(response.outputs, back)

    def _reshaped(
        self, tensors: Sequence[Tensor], reshapes: dict[str, Reshape]
    ) -> tuple[Tensor, ...]:
        return tuple(
            [
                self._reshape(each, reshapes[each.name]) if each.name in reshapes else each
                for each in tensors
            ]
        )

    def _reshape(self, tensor: Tensor, reshape: Reshape) -> Tensor:
        shape = reshape.shape(tensor.shape)
        if shape is None:
            expected = (ANY_SIZE, *reshape.before) if reshape.batching else reshape.before
            raise InferenceError(
                Code.INTERNAL,
                f"tensor '{tensor.name}' of model '{self._model}' cannot be reshaped: found shape "
                f"{format_shape(tensor.shape)}, expected {format_shape(expected)}",
            )
        return replace(tensor, shape=shape)


def as_model_sees(config: ModelConfig) -> ModelConfig:
    """The config with the model's dims, without reshapes."""
    return replace(
        config,
        input=tuple([_input_inside(each) for each in config.input]),
        output=tuple([_output_inside(each) for each in config.output]),
    )


def _input_inside(each: ModelInput) -> ModelInput:
    if each.reshape is None:
        return each
    return replace(each, dims=each.reshape.shape, reshape=None)


def _output_inside(each: ModelOutput) -> ModelOutput:
    if each.reshape is None:
        return each
    return replace(each, dims=each.reshape.shape, reshape=None)


def whole_shape_problems(
    model: str, tensor: str, found: Sequence[int], dims: Sequence[int]
) -> Iterator[str]:
    """The difference of the model's shape `found` from the dims of a model without batching."""
    if not agree(found, dims):
        yield f"{_difference(model, tensor, found, dims)} (shape {format_shape(dims)})"


def batched_shape_problems(
    model: str, tensor: str, found: Sequence[int], dims: Sequence[int]
) -> Iterator[str]:
    """The difference of the model's shape `found` from a batch dimension and configured dims."""
    whole = (-1, *dims)
    if not agree(found, whole):
        yield (
            f"{_difference(model, tensor, found, whole)} (an initial batch dimension "
            "because max_batch_size > 0 followed by the explicit tensor shape, making complete "
            f"shape {format_shape(whole)})"
        )


def _difference(model: str, tensor: str, found: Sequence[int], dims: Sequence[int]) -> str:
    return (
        f"model '{model}', tensor '{tensor}': the model expects {len(found)} dimensions "
        f"(shape {format_shape(found)}) but the model configuration specifies {len(dims)} "
        "dimensions"
    )


def agree(dims: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two shapes may belong to the same tensor; -1 is any size on either side."""
    return len(dims) == len(others) and all(
        one == other or ANY_SIZE in (one, other) for one, other in zip(dims, others, strict=True)
    )
