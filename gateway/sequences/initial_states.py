"""What do the states of a sequence begin with, where the config says so? Blocks on files."""

import math
from pathlib import Path

from gateway.config import ModelConfig
from gateway.config.scheduling import InitialState, State
from gateway.data_files import DataFiles
from gateway.errors import Code, InferenceError
from gateway.sequences.states import zeros
from gateway.tensor import SIZES, Datatype, Tensor

MAX_BYTES = 2**31 - 1
"""The most bytes of a state's file, as many as a message on gRPC has."""


def read_initial_states(config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """The values that a checked config gives to states, by the names of their inputs.

    `folder` is the model's, with its `initial_state/`. Raises InferenceError with Triton's texts:
    INVALID_ARG, or INTERNAL for a file that cannot be read.
    """
    batching = config.sequence_batching
    return {
        state.input_name: _read(config, state, state.initial_state[0], folder)
        for state in (batching.state if batching else ())
        if state.initial_state
    }


def _read(config: ModelConfig, state: State, given: InitialState, folder: Path) -> Tensor:
    datatype = given.data_type.datatype
    shape = (1, *given.dims) if config.batching else given.dims
    if given.data_file is None:
        return zeros(state.input_name, datatype, shape)
    files = DataFiles(config.name, folder, "initial_state", "initial state")
    data = files.read(given.data_file, MAX_BYTES)
    tensor = Tensor(state.input_name, datatype, shape, data)
    if datatype is Datatype.BYTES:
        return _strings(tensor, given.data_file)
    expected = math.prod(shape) * SIZES[datatype]
    if len(data) < expected:
        # The missing space is Triton's.
        raise InferenceError(
            Code.INVALID_ARG,
            f"initial_state setting expects {expected} bytes, but the data provided from "
            f"{given.data_file}only has {len(data)} bytes.",
        )
    return Tensor(state.input_name, datatype, shape, data[:expected])


def _strings(tensor: Tensor, filename: str) -> Tensor:
    elements = tensor.elements()
    if len(elements) != tensor.count:
        raise InferenceError(
            Code.INVALID_ARG,
            f"initial_state setting expects {tensor.count} string elements, but the data provided "
            f"from {filename} has {len(elements)}",
        )
    return Tensor(tensor.name, tensor.datatype, tensor.shape, elements)
