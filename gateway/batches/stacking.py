"""Stacking: inputs of several requests as one batch, and its outputs as those of each request."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat

import numpy as np

from gateway.batches.extra_inputs import batch_tensors
from gateway.batches.padding import Padding, cut_padded, pad, pad_value
from gateway.config import ModelConfig, ModelInput
from gateway.device_memory import DeviceMemory
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.tensor import (
    SIZES,
    Buffer,
    Datatype,
    Tensor,
    array_tensor,
    format_shape,
)

Shape = tuple[int, ...]
LOCK_FREE_BYTES = 65536
"""From this size on numpy copies, without the interpreter lock; below, joining bytes is faster."""


class Stacking:
    """Gathers the inputs of an execution, and scatters its outputs; one per model.

    The requests have passed the checks of the data plane. The batcher puts only compatible
    requests together: the same inputs, of equal shapes unless ragged or padded; several requests
    only if the model batches. The config has the dims of the model (`as_model_sees`).
    Raises InferenceError INVALID_ARG if the config's padding is invalid.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._inputs = {each.name: each for each in config.input}
        self._outputs = {each.name: each for each in config.output}
        self._names = tuple(self._outputs)
        self._sources = {
            name: each.source_input[0] for each in config.batch_output for name in each.target_name
        }
        self._padding = Padding.read(config)
        self._pads = {
            name: pad_value(name, self._inputs[name].datatype, value)
            for name, value in self._padding.inputs.items()
        }
        self._as_sent = not config.batch_input and not any(
            each.allow_ragged_batch for each in config.input
        )

    def gather(self, requests: Sequence[InferRequest]) -> dict[str, Tensor]:
        """The inputs of one execution for the runtime, by name.

        The inputs of a single request are not copied.
        """
        if len(requests) == 1 and self._as_sent:
            return {tensor.name: tensor for tensor in requests[0].inputs}
        found = {
            tensor.name: self._stack(self._inputs[tensor.name], requests)
            for tensor in requests[0].inputs
        }
        for batch_input in self._config.batch_input:
            sources = [_input(request, batch_input.source_input[0]) for request in requests]
            for made in batch_tensors(batch_input, [source.shape for source in sources]):
                found[made.name] = made
        return found

    def wanted(self, requests: Sequence[InferRequest]) -> tuple[str, ...]:
        """The outputs that any of the requests names, in the order of the config."""
        names = set()
        for request in requests:
            if not request.outputs:
                return self._names
            names.update([output.name for output in request.outputs])
        if len(names) == len(self._names):
            return self._names
        return tuple([name for name in self._names if name in names])

    def scatter(
        self, outputs: Mapping[str, Tensor], requests: Sequence[InferRequest]
    ) -> Iterable[tuple[Tensor, ...]]:
        """The outputs of each request, as views of the batch's outputs.

        Raises InferenceError INTERNAL if an output contradicts the config or the batch.
        """
        rows = [self._rows(request) for request in requests]
        columns = [self._split(tensor, rows, requests) for tensor in outputs.values()]
        parts = zip(*columns, strict=True) if columns else repeat((), len(requests))
        for request, found in zip(requests, parts, strict=True):
            if request.outputs and len(request.outputs) < len(found):
                asked = {output.name for output in request.outputs}
                found = tuple(tensor for tensor in found if tensor.name in asked)
            yield found

    def _rows(self, request: InferRequest) -> int:
        return request.inputs[0].shape[0] if self._config.batching and request.inputs else 1

    # Inputs.

    def _stack(self, model_input: ModelInput, requests: Sequence[InferRequest]) -> Tensor:
        tensors = _inputs(requests, model_input.name)
        first = tensors[0]
        if model_input.allow_ragged_batch:
            return replace(first, shape=(sum(each.count for each in tensors),), data=_data(tensors))
        if model_input.name in self._pads and len({each.shape[1] for each in tensors}) > 1:
            return self._pad(tensors)
        shape = first.shape
        if len(tensors) > 1:
            shape = (sum([each.shape[0] for each in tensors]), *first.shape[1:])
        return Tensor(first.name, first.datatype, shape, _data(tensors))

    def _pad(self, tensors: Sequence[Tensor]) -> Tensor:
        name, datatype = tensors[0].name, tensors[0].datatype
        length = max(tensor.shape[1] for tensor in tensors)
        return array_tensor(name, datatype, pad(tensors, length, self._pads[name]))

    # Outputs.

    def _split(
        self, tensor: Tensor, rows: Sequence[int], requests: Sequence[InferRequest]
    ) -> list[Tensor]:
        if source := self._sources.get(tensor.name):
            return self._split_as(tensor, [_input(request, source).shape for request in requests])
        self._check_output(tensor, sum(rows))
        if len(rows) == 1:
            return [tensor]
        if tensor.name in self._padding.outputs:
            lengths = self._lengths(requests)
            if len(set(lengths)) > 1:
                self._check_length(tensor, max(lengths))
                return cut_padded(tensor, rows, lengths)
        return cut_rows(tensor, rows)

    def _split_as(self, tensor: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        expected = sum(map(math.prod, shapes))
        if tensor.count != expected:
            raise self._contradiction(
                tensor, f"{expected} elements, as '{self._sources[tensor.name]}' has"
            )
        return cut(tensor, shapes)

    def _check_output(self, tensor: Tensor, rows: int) -> None:
        output = self._outputs.get(tensor.name)
        if output is None:
            return
        expected = (rows, *output.dims) if self._config.batching else output.dims
        if not _fits(tensor.shape, expected):
            raise self._contradiction(tensor, f"shape {format_shape(expected)}")
        if tensor.datatype is not output.datatype:
            raise self._contradiction(tensor, f"datatype {output.datatype}")

    def _lengths(self, requests: Sequence[InferRequest]) -> list[int]:
        name = next(iter(self._pads))
        return [_input(request, name).shape[1] for request in requests]

    def _check_length(self, tensor: Tensor, longest: int) -> None:
        if tensor.shape[1] != longest:
            raise self._contradiction(
                tensor, f"length {longest}, to which the batch's sequences were padded"
            )

    def _contradiction(self, tensor: Tensor, expected: str) -> InferenceError:
        return InferenceError(
            Code.INTERNAL,
            f"model '{self._config.name}' gave output '{tensor.name}' with datatype "
            f"{tensor.datatype} and shape {format_shape(tensor.shape)}, expected {expected}",
        )


def _data(tensors: Sequence[Tensor]) -> Buffer | DeviceMemory | tuple[bytes, ...]:
    return tensors[0].data if len(tensors) == 1 else join(tensors)


def _inputs(requests: Sequence[InferRequest], name: str) -> list[Tensor]:
    """The input of that name of each request, usually at the same index."""
    place = [tensor.name for tensor in requests[0].inputs].index(name)
    return [
        request.inputs[place]
        if place < len(request.inputs) and request.inputs[place].name == name
        else _input(request, name)
        for request in requests
    ]


def _input(request: InferRequest, name: str) -> Tensor:
    tensor = request.input(name)
    if tensor is None:  # optional, but the batch or a batch input needs it
        raise InferenceError(
            Code.INVALID_ARG,
            f"input '{name}' of model '{request.model}' is missing, and its batch needs it",
        )
    return tensor


def _fits(shape: Shape, expected: Shape) -> bool:
    return shape == expected or (
        len(shape) == len(expected)
        and all(want in (-1, have) for have, want in zip(shape, expected, strict=True))
    )


def join(tensors: Sequence[Tensor]) -> Buffer | tuple[bytes, ...]:
    """The data of tensors one after the other, in one allocation."""
    if tensors[0].datatype is Datatype.BYTES and any(
        isinstance(tensor.data, tuple) for tensor in tensors
    ):
        return tuple(itertools.chain.from_iterable(tensor.elements() for tensor in tensors))
    parts = [tensor.raw() for tensor in tensors]
    size = sum(map(len, parts))
    return _copied(parts, size) if size >= LOCK_FREE_BYTES else b"".join(parts)


def _copied(parts: Sequence[Buffer], size: int) -> memoryview:
    whole = np.empty(size, dtype=np.uint8)
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        whole[start:end] = np.frombuffer(part, dtype=np.uint8)
    return whole.data


def cut_rows(tensor: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """A part of the tensor for each number of rows; their sum is its first dimension."""
    below = tensor.shape[1:]
    shapes = {count: (count, *below) for count in set(rows)}
    return cut(tensor, [shapes[count] for count in rows])


def cut(tensor: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """A part of the tensor for each shape, in the order of its data, without a copy.

    The number of elements of all shapes is that of the tensor.
    """
    name, datatype = tensor.name, tensor.datatype
    is_bytes = datatype is Datatype.BYTES
    data = tensor.elements() if is_bytes else memoryview(tensor.raw())
    size = 1 if is_bytes else SIZES[datatype]
    sizes = {shape: math.prod(shape) * size for shape in set(shapes)}
    parts: list[Tensor] = []
    end = 0
    for shape in shapes:
        start, end = end, end + sizes[shape]
        parts.append(Tensor(name, datatype, shape, data[start:end]))
    return parts
