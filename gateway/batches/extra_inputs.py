"""Inputs that no client sends: batch inputs, and those of the sequence batcher."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.config import BatchInput, BatchInputKind, ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.config.scheduling import Control, ControlKind, SequenceBatching, State
from gateway.tensor import NUMPY_TYPES, Tensor, array_tensor

Shape = tuple[int, ...]


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
        output=(*config.output, *(_output(each) for each in states)),
    )


def sequence_inputs(batching: SequenceBatching) -> tuple[ModelInput, ...]:
    """The inputs that the sequence batcher adds to each request: controls, then states."""
    controls = (
        ModelInput(name=each.name, data_type=control_type(control), dims=(1,))
        for each in batching.control_input
        for control in each.control[:1]
    )
    return (*controls, *(_input(each) for each in batching.state))


def control_type(control: Control) -> DataType:
    """The data type of a control's tensor."""
    if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        return control.data_type
    if control.int32_false_true:
        return DataType.TYPE_INT32
    return DataType.TYPE_FP32 if control.fp32_false_true else DataType.TYPE_BOOL


def _input(state: State) -> ModelInput:
    return ModelInput(name=state.input_name, data_type=state.data_type, dims=state.dims)


def _output(state: State) -> ModelOutput:
    return ModelOutput(name=state.output_name, data_type=state.data_type, dims=state.dims)
