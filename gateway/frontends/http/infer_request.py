"""Decoding of v2 infer requests: JSON and binary data to the message; no I/O."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.frontends.http.infer_inputs import (
    BinaryInput,
    InferInputReader,
    raw_input,
    read_region,
)
from gateway.frontends.http.json_object import (
    Members,
    array_member,
    boolean_member,
    members_of,
    parameters_of,
    parse_request,
    string_member,
)
from gateway.frontends.http.request_parameters import (
    JsonParameters,
    read_parameters,
    with_headers,
)
from gateway.messages import NO_PARAMETERS, InferRequest, RequestedOutput, SharedRegion
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import Tensor
from gateway.value import value

MOST_KNOWN = 256
MOST_BYTES = 4096
"""Longest JSON that is kept; decoding a longer one is short in comparison with its data."""


@value
class OutputForms:
    """The requested outputs by name; an empty `listed` requests all.

    `binary` has the form of each listed output, `default` that of the others. `only_binary`: all
    go behind the JSON unchanged.
    """

    default: bool = False
    listed: Mapping[str, RequestedOutput] = field(default_factory=lambda: NO_PARAMETERS)
    binary: Mapping[str, bool] = field(default_factory=lambda: NO_PARAMETERS)
    only_binary: bool = False

    def wants(self, name: str) -> bool:
        """Whether an output is requested."""
        return not self.listed or name in self.listed

    def is_binary(self, name: str) -> bool:
        """Whether an output is binary data behind the JSON."""
        return self.binary.get(name, self.default)


def read_outputs(
    found: Members, shared_memory: SharedMemory, *, default: bool
) -> tuple[tuple[RequestedOutput, ...], OutputForms]:
    """The optional member `outputs` of a request; `default` is the form of outputs not listed.

    InferenceError with Triton's texts. Locating a region here keeps it registered.
    """
    if not found.get("outputs", ()):
        if "outputs" in found:
            array_member(found, "outputs")
        return (), OutputForms(default, only_binary=default)
    listed: dict[str, RequestedOutput] = {}
    binary: dict[str, bool] = {}
    for each in array_member(found, "outputs"):
        name = string_member(members_of(each), "name")
        parameters = parameters_of(each)
        wants_binary = "binary_data" in parameters and boolean_member(parameters, "binary_data")
        # Of outputs with one name Triton serves the first, in its form.
        listed.setdefault(name, _output(name, parameters, shared_memory))
        binary.setdefault(name, wants_binary)
    outputs = tuple(listed.values())
    only_binary = all(binary.values()) and not any(each.classes or each.region for each in outputs)
    return outputs, OutputForms(default, listed, binary, only_binary)


def _output(name: str, parameters: Members, shared_memory: SharedMemory) -> RequestedOutput:
    if not parameters:
        return RequestedOutput(name)
    classes = _classes(parameters)
    return RequestedOutput(name, classes, _region(parameters, shared_memory, classes))


def _classes(parameters: Members) -> int:
    found = parameters.get("classification", 0)
    if type(found) is int and found >= 0:
        return found
    raise InferenceError(
        Code.INTERNAL,
        "Unable to set 'classification': attempt to access JSON non-unsigned-integer as "
        "unsigned-integer",
    )


def _region(parameters: Members, shared_memory: SharedMemory, classes: int) -> SharedRegion | None:
    if "shared_memory_region" not in parameters:
        return None
    if classes:
        raise _exclusive("classification")
    if parameters.get("binary_data"):
        raise _exclusive("binary_data")
    return shared_memory.locate(read_region(parameters))


def _exclusive(other: str) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG, f"Output can't set both 'shared_memory_region' and '{other}'"
    )


class KnownRequest(NamedTuple):
    """The decoded JSON of a request, not to be changed; `size` bytes follow the JSON."""

    size: int
    id: str
    parameters: JsonParameters
    binary_inputs: Sequence[BinaryInput]
    outputs: tuple[RequestedOutput, ...]
    forms: OutputForms

    def inputs(self, binary: memoryview) -> tuple[Tensor, ...]:
        """The inputs, as views of these bytes."""
        return tuple(
            [
                Tensor(name, datatype, shape, binary[start:end])
                for name, datatype, shape, start, end in self.binary_inputs
            ]
        )


class KnownRequests:
    """Decoded requests by their JSON. Clients repeat the JSON and change the binary data."""

    def __init__(self) -> None:
        self._known: dict[bytes, KnownRequest] = {}

    def get(self, header: bytes, size: int) -> KnownRequest | None:
        """The request with that JSON and `size` bytes behind it, if it is known."""
        known = self._known.get(header) if len(header) <= MOST_BYTES else None
        return known if known is not None and known.size == size else None

    def add(self, header: bytes, known: KnownRequest) -> None:
        """Keep a valid request; when full, in place of the oldest."""
        if len(header) > MOST_BYTES:
            return
        if len(self._known) >= MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[header] = known


class Target(NamedTuple):
    """The model of a request, and the parts that are not in its body.

    `version` is the requested one; `headers` are those that the model gets as parameters.
    """

    config: ModelConfig
    version: str = ""
    headers: Iterable[tuple[str, str]] = ()
    received_ns: int = 0


class InferDecoder:
    """Decodes requests; their inputs are views of the body.

    `limit` is the maximum size in bytes of an input given in JSON.
    """

    def __init__(self, shared_memory: SharedMemory, limit: int) -> None:
        self._shared_memory = shared_memory
        self._limit = limit
        self._known = KnownRequests()

    def decode(
        self, target: Target, header: bytes | memoryview, binary: memoryview
    ) -> tuple[InferRequest, OutputForms]:
        """The request with the JSON `header` and binary data (binary tensor data extension).

        Checks the rules of the wire in Triton's order; raises InferenceError.
        """
        if not isinstance(header, bytes):
            return self._read(target, header, binary)
        known = self._known.get(header, len(binary))
        if known is None:
            return self._read(target, header, binary)
        return _request(target, known, known.inputs(binary)), known.forms

    def _read(
        self, target: Target, header: bytes | memoryview, binary: memoryview
    ) -> tuple[InferRequest, OutputForms]:
        found = parse_request(header)
        request_id = string_member(found, "id") if "id" in found else ""
        parameters = read_parameters(found)
        reader = InferInputReader(target.config, binary, self._shared_memory, self._limit)
        inputs = reader.read(found, request_id)
        outputs, forms = read_outputs(found, self._shared_memory, default=parameters.binary_output)
        meaning = KnownRequest(
            len(binary), request_id, parameters, reader.binary_inputs, outputs, forms
        )
        request = _request(target, meaning, inputs)
        if (
            isinstance(header, bytes)
            and inputs
            and len(reader.binary_inputs) == len(inputs)
            and not any(each.region for each in outputs)
        ):
            self._known.add(header, meaning)
        return request, forms

    def decode_raw(self, target: Target, body: memoryview) -> tuple[InferRequest, OutputForms]:
        """The request whose body is the data of the only input (raw binary request)."""
        parameters = with_headers({}, target.headers)
        request = InferRequest(
            model=target.config.name,
            version=target.version,
            inputs=(raw_input(target.config, body),),
            parameters=parameters,
            received_ns=target.received_ns,
        )
        return request, OutputForms(default=True, only_binary=True)


def _request(target: Target, known: KnownRequest, inputs: tuple[Tensor, ...]) -> InferRequest:
    parameters = known.parameters
    return InferRequest(
        model=target.config.name,
        version=target.version,
        id=known.id,
        inputs=inputs,
        outputs=known.outputs,
        parameters=with_headers(parameters.custom, target.headers),
        sequence=parameters.sequence,
        priority=parameters.priority,
        timeout_us=parameters.timeout_us,
        received_ns=target.received_ns,
    )
