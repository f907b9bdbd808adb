"""The inputs of a request in order, each from JSON, from the bytes behind it, or shared memory."""

from typing import Any, NamedTuple

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.frontends.http import members
from gateway.frontends.http.json_input import read_json_input
from gateway.frontends.http.large_json import LargeArray
from gateway.frontends.http.members import Members
from gateway.messages import SharedRegion, request_prefix
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import Datatype, Tensor

DATATYPES: Members = {str(datatype): datatype for datatype in Datatype}
INVALID = "<invalid>"
"""How Triton calls the datatype of a name that it does not know."""


class Piece(NamedTuple):
    """An input whose data are those bytes behind the JSON."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    start: int
    end: int


class InputReader:
    """Reads the inputs of one request, and counts the binary data off as they take it.

    `limit` is the most bytes that an input given in JSON may have.
    """

    def __init__(
        self, config: ModelConfig, binary: memoryview, shared_memory: SharedMemory, limit: int
    ) -> None:
        self._config = config
        self._binary = binary
        self._shared_memory = shared_memory
        self._limit = limit
        self._taken = 0
        self.pieces: list[Piece] = []
        """The inputs from the bytes behind the JSON."""

    def read(self, found: Members, request_id: str) -> tuple[Tensor, ...]:
        """The member `inputs` of a request; InferenceError with Triton's texts."""
        tensors = tuple(
            [self._input(members.of(each), request_id) for each in members.array(found, "inputs")]
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
        source = _source(found, parameters := members.parameters(found))
        name = members.string(found, "name")
        shape = members.shape(found, "shape")
        datatype = DATATYPES.get(members.string(found, "datatype"))
        if datatype is None:
            raise self._invalid_datatype(name, source, request_id)
        if source == "data":
            data: Any = found["data"]
            if type(data) is not LargeArray:
                data = members.array(found, "data")
            return read_json_input(name, datatype, shape, data, self._limit)
        if source == "binary_data_size":
            start, taken = self._taken, self._take(name, parameters)
            self.pieces.append(Piece(name, datatype, shape, start, self._taken))
            return Tensor(name, datatype, shape, taken)
        region = read_region(parameters)
        return Tensor(name, datatype, shape, self._shared_memory.read(region, datatype))

    def _take(self, name: str, parameters: Members) -> memoryview:
        """The next bytes behind the JSON, as many as the input says."""
        start = self._taken
        end = start + members.unsigned(parameters, "binary_data_size")
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
    """The part of shared memory that a tensor's parameters name."""
    return SharedRegion(
        members.string(parameters, "shared_memory_region"),
        _unsigned_or_zero(parameters, "shared_memory_byte_size"),
        _unsigned_or_zero(parameters, "shared_memory_offset"),
    )


def _unsigned_or_zero(parameters: Members, key: str) -> int:
    return members.unsigned(parameters, key) if key in parameters else 0


def _source(found: Members, parameters: Members) -> str:
    """Where the data is: the name of the one member that says so."""
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
