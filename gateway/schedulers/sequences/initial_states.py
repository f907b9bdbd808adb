"""What do the states of a sequence begin with, where the config says so? Blocks on files."""

import math
from pathlib import Path

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.schedulers.sequences.states import zeros
from gateway.scheduling import InitialState, State
from gateway.tensor import SIZES, Datatype, Tensor

FOLDER = "initial_state"
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
    data = _file(config.name, folder, given.data_file)
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


def _file(model: str, folder: Path, filename: str) -> bytes:
    """A regular file in the model's `initial_state`; links may not lead out of it."""
    try:
        inside = (folder / FOLDER).resolve()
        path = (inside / filename).resolve()
        if not path.is_relative_to(inside):
            raise InferenceError(
                Code.INVALID_ARG,
                f"initial state file '{filename}' is outside the {FOLDER} directory of model "
                f"'{model}'",
            )
        if path.exists() and not path.is_file():
            raise _unreadable(model, filename, "Not a regular file")
        with path.open("rb") as file:
            return file.read(MAX_BYTES)
    except OSError as error:
        raise _unreadable(model, filename, error.strerror) from None
    except (ValueError, RuntimeError):  # a NUL in the name, a loop of links
        raise _unreadable(model, filename, "Invalid name") from None


def _unreadable(model: str, filename: str, reason: str | None) -> InferenceError:
    return InferenceError(
        Code.INTERNAL, f"failed to open text file for read {model}/{FOLDER}/{filename}: {reason}"
    )
