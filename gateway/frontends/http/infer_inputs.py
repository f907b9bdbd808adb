"""Inputs of an infer request: JSON, binary data behind it, shared memory, or a raw body."""

import math
from typing import Any, NamedTuple

from gateway.config import ModelConfig, ModelInput
from gateway.errors import Code, InferenceError
from gateway.frontends.http.json_object import (
    Members,
    array_member,
    members_of,
    parameters_of,
    shape_member,
    string_member,
    unsigned_member,
)
from gateway.frontends.http.json_tensors import read_json_input
from gateway.frontends.http.large_json import LargeArray
from gateway.messages import SharedRegion, request_prefix
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import SIZES, Datatype, Tensor

DATATYPES: Members = {str(datatype): datatype for datatype in Datatype}
INVALID = "<invalid>"
"""Triton's name for an unknown datatype."""


class BinaryInput(NamedTuple):
    """An input whose data are the bytes `start:end` behind the JSON."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    start: int
    end: int


class InferInputReader:
    """Reads the inputs of one request in order; each binary input takes the bytes that follow.

    `limit` is the maximum size in bytes of an input given in JSON.
    """

    def __init__(
        self, config: ModelConfig, binary: memoryview, shared_memory: SharedMemory, limit: int
    ) -> None:
        self._config = config
        self._binary = binary
        self._shared_memory = shared_memory
        self._limit = limit
        self._taken = 0
        self.binary_inputs: list[BinaryInput] = []

    def read(self, found: Members, request_id: str) -> tuple[Tensor, ...]:
        """The member `inputs` of a request; InferenceError with Triton's texts."""
        tensors = tuple(
            [self._input(members_of(each), request_id) for each in array_member(found, "inputs")]
        )
        if self._taken != len(self._binary):
            raise InferenceError(
                Code.INVALID_ARG, f"unexpected additional input data for model '{self._name}'"
            )
        return tensors

    @property
    def _name(self) -> str:
        return self._config.name

    def _input(self, found: Members, request_id: str) -> Tensor:
        source = _source(found, parameters := parameters_of(found))
        name = string_member(found, "name")
        shape = shape_member(found, "shape")
        datatype = DATATYPES.get(string_member(found, "datatype"))
        if datatype is None:
            raise self._invalid_datatype(name, source, request_id)
        if source == "data":
            data: Any = found["data"]
            if type(data) is not LargeArray:
                data = array_member(found, "data")
            return read_json_input(name, datatype, shape, data, self._limit)
        if source == "binary_data_size":
            start, taken = self._taken, self._take(name, parameters)
            self.binary_inputs.append(BinaryInput(name, datatype, shape, start, self._taken))
            return Tensor(name, datatype, shape, taken)
        region = read_region(parameters)
        return Tensor(name, datatype, shape, self._shared_memory.read(region, datatype))

    def _take(self, name: str, parameters: Members) -> memoryview:
        """The next bytes behind the JSON, `binary_data_size` of them."""
        start = self._taken
        end = start + unsigned_member(parameters, "binary_data_size")
        if end > len(self._binary):
            raise InferenceError(
                Code.INVALID_ARG,
                f"unexpected size for input '{name}', expecting {end - len(self._binary)} "
                f"additional bytes for model '{self._name}'",
            )
        self._taken = end
        return self._binary[start:end]

    def _invalid_datatype(self, name: str, source: str, request_id: str) -> InferenceError:
        if source == "data":
            return InferenceError(Code.INVALID_ARG, f"invalid datatype for input {name}")
        expected = [each.datatype for each in self._config.input if each.name == name]
        if not expected:
            return InferenceError(
                Code.INVALID_ARG,
                f"unexpected inference input '{name}' for model '{self._name}'",
            )
        return InferenceError(
            Code.INVALID_ARG,
            f"{request_prefix(request_id)}inference input '{name}' data-type is '{INVALID}', but "
            f"model '{self._name}' expects '{expected[0]}'",
        )


def read_region(parameters: Members) -> SharedRegion:
    """The part of a shared memory region that a tensor's parameters name."""
    return SharedRegion(
        string_member(parameters, "shared_memory_region"),
        _unsigned_or_zero(parameters, "shared_memory_byte_size"),
        _unsigned_or_zero(parameters, "shared_memory_offset"),
    )


def _unsigned_or_zero(parameters: Members, key: str) -> int:
    return unsigned_member(parameters, key) if key in parameters else 0


def _source(found: Members, parameters: Members) -> str:
    """The one member that names the source of the data."""
    has_data, has_size = "data" in found, "binary_data_size" in parameters
    has_region = "shared_memory_region" in parameters
    if has_data + has_size + has_region == 1:
        return "data" if has_data else "binary_data_size" if has_size else "shared_memory_region"
    named = {"data": has_data, "binary_data_size": has_size, "shared_memory_region": has_region}
    fields = "".join(f" '{name}'" for name, is_set in named.items() if is_set)
    raise InferenceError(
        Code.INVALID_ARG,
        "Input must set only one of the following fields: 'data', 'binary_data_size' in "
        "'parameters', 'shared_memory_region' in 'parameters'. But "
        + (f"set{fields}" if fields else "no field is set"),
    )


def raw_input(config: ModelConfig, body: memoryview) -> Tensor:
    """The model's only input with the whole body as data, as a batch of one.

    A variable dim follows from the size of the body. INVALID_ARG if it cannot.
    """
    if len(config.input) != 1:
        raise _refusal(
            "Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(config.input)} inputs in '{config.name}' model configuration"
        )
    expected = config.input[0]
    batch = (1,) if config.batching else ()
    if expected.datatype is Datatype.BYTES:
        if expected.dims != (1,):
            raise _refusal(
                f"For BYTE datatype raw input '{expected.name}', the model must have input shape "
                "[1]"
            )
        return Tensor(expected.name, Datatype.BYTES, (*batch, 1), (bytes(body),))
    shape = (*batch, *_deduced(expected, len(body)))
    return Tensor(expected.name, expected.datatype, shape, body)


def _deduced(expected: ModelInput, byte_size: int) -> tuple[int, ...]:
    if expected.dims.count(-1) > 1:
        raise _refusal(
            f"The shape of the raw input '{expected.name}' can not be deduced because there are "
            "more than one variable-sized dimension"
        )
    fixed = math.prod(dim for dim in expected.dims if dim != -1)
    left = byte_size // SIZES[expected.datatype] // fixed if fixed else 0
    return tuple(left if dim == -1 else dim for dim in expected.dims)


def _refusal(text: str) -> InferenceError:
    # A raw request has no id.
    return InferenceError(Code.INVALID_ARG, request_prefix("") + text)
