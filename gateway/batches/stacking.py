"""Stacking: inputs of several requests as one batch, and its outputs as those of each request.

Batch inputs, and the inputs of the sequence batcher, are inputs that no client sends.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.batches.padding import Padding, cut_padded, pad, pad_value
from gateway.config import BatchInput, BatchInputKind, ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.config.scheduling import Control, ControlKind, SequenceBatching, State
from gateway.cuda_driver import DeviceMemory
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.tensor import NUMPY_TYPES, SIZES, Buffer, Datatype, Tensor, array_tensor, format_shape

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
        self._batching = config.batching
        self._inputs = {each.name: each for each in config.input}
        self._outputs = {each.name: (each.datatype, each.dims) for each in config.output}
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
            alone = {}
            for tensor in requests[0].inputs:  # in Python 3.11 a comprehension is a call
                alone[tensor.name] = tensor
            return alone
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
    ) -> list[tuple[Tensor, ...]]:
        """The outputs of each request, as views of the batch's outputs.

        Raises InferenceError INTERNAL if an output contradicts the config or the batch.
        """
        if len(requests) == 1 and not self._sources:
            inputs = requests[0].inputs
            rows = inputs[0].shape[0] if self._batching and inputs else 1
            for tensor in outputs.values():
                self._check_output(tensor, rows)
            found = tuple(outputs.values())
            return [_asked(found, requests[0]) if requests[0].outputs else found]
        return self._scatter(outputs, requests)

    def _scatter(
        self, outputs: Mapping[str, Tensor], requests: Sequence[InferRequest]
    ) -> list[tuple[Tensor, ...]]:
        rows = [
            request.inputs[0].shape[0] if self._batching and request.inputs else 1
            for request in requests
        ]
        columns = [self._split(tensor, rows, requests) for tensor in outputs.values()]
        parts = zip(*columns, strict=True) if columns else repeat((), len(requests))
        return [_asked(found, request) for request, found in zip(requests, parts, strict=True)]

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
        known = self._outputs.get(tensor.name)
        if known is None:
            return
        datatype, dims = known
        expected = (rows, *dims) if self._batching else dims
        if tensor.shape != expected and not _fits(tensor.shape, expected):
            raise self._contradiction(tensor, f"shape {format_shape(expected)}")
        if tensor.datatype is not datatype:
            raise self._contradiction(tensor, f"datatype {datatype}")

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


def _asked(outputs: tuple[Tensor, ...], request: InferRequest) -> tuple[Tensor, ...]:
    """The outputs that a request names; all if it names none."""
    if not request.outputs or len(request.outputs) >= len(outputs):
        return outputs
    asked = {output.name for output in request.outputs}
    return tuple(tensor for tensor in outputs if tensor.name in asked)


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
    return len(shape) == len(expected) and all(
        want in (-1, have) for have, want in zip(shape, expected, strict=True)
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


def batch_tensors(batch_input: BatchInput, shapes: Sequence[Shape]) -> list[Tensor]:
    """The tensors of a `batch_input` for one batch: the same values under every target name.

    `shapes` are those of the source input in each request; the first dimension is the batch size
    of the request. Counts are per request, item shapes per item of the batch.
    """
    datatype = batch_input.data_type.datatype
    values = VALUES[batch_input.kind](shapes).astype(NUMPY_TYPES[datatype])
    return [array_tensor(name, datatype, values) for name in batch_input.target_name]


def _counts(shapes: Sequence[Shape]) -> npt.NDArray[Any]:
    return np.array([math.prod(shape) for shape in shapes], dtype=np.int64)


def _ends(shapes: Sequence[Shape]) -> npt.NDArray[Any]:
    return np.cumsum(_counts(shapes))


def _bounds(shapes: Sequence[Shape]) -> npt.NDArray[Any]:
    return np.concatenate([[0], _ends(shapes)])


def _largest_as_shape(shapes: Sequence[Shape]) -> npt.NDArray[Any]:
    return np.zeros(_counts(shapes).max(initial=0), dtype=np.int64)


def _item_shapes(shapes: Sequence[Shape]) -> npt.NDArray[Any]:
    items = list(itertools.chain.from_iterable([shape[1:]] * shape[0] for shape in shapes))
    return np.array(items, dtype=np.int64).reshape(len(items), len(shapes[0]) - 1)


def _item_shapes_flat(shapes: Sequence[Shape]) -> npt.NDArray[Any]:
    return _item_shapes(shapes).reshape(-1)


VALUES: Mapping[BatchInputKind, Callable[[Sequence[Shape]], npt.NDArray[Any]]] = {
    BatchInputKind.BATCH_ELEMENT_COUNT: _counts,
    BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT: _ends,
    BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: _bounds,
    BatchInputKind.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE: _largest_as_shape,
    BatchInputKind.BATCH_ITEM_SHAPE: _item_shapes,
    BatchInputKind.BATCH_ITEM_SHAPE_FLATTEN: _item_shapes_flat,
}


def with_sequence_tensors(config: ModelConfig) -> ModelConfig:
    """The config with control inputs and states among its inputs and outputs.

    To the model they are tensors like others (`ModelSequenceBatching`).
    """
    batching = config.sequence_batching
    if batching is None:
        return config
    known = {each.name for each in config.output}
    states = [each for each in batching.state if each.output_name not in known]
    return replace(
        config,
        input=(*config.input, *sequence_inputs(batching)),
        output=(*config.output, *(_state_output(each) for each in states)),
    )


def sequence_inputs(batching: SequenceBatching) -> tuple[ModelInput, ...]:
    """The inputs that the sequence batcher adds to each request: controls, then states."""
    controls = (
        ModelInput(name=each.name, data_type=control_type(control), dims=(1,))
        for each in batching.control_input
        for control in each.control[:1]
    )
    return (*controls, *(_state_input(each) for each in batching.state))


def control_type(control: Control) -> DataType:
    """The data type of a control's tensor."""
    if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        return control.data_type
    if control.int32_false_true:
        return DataType.TYPE_INT32
    return DataType.TYPE_FP32 if control.fp32_false_true else DataType.TYPE_BOOL


def _state_input(state: State) -> ModelInput:
    return ModelInput(name=state.input_name, data_type=state.data_type, dims=state.dims)


def _state_output(state: State) -> ModelOutput:
    return ModelOutput(name=state.output_name, data_type=state.data_type, dims=state.dims)
