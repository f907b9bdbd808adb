"""An infer request of the v2 protocol: its JSON and binary data to the message; no I/O."""

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
    InferParameters,
    read_parameters,
    with_headers,
)
from gateway.messages import NO_PARAMETERS, InferRequest, RequestedOutput, SharedRegion
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import Tensor
from gateway.value import value


@value
class OutputForms:
    """The outputs that are asked for, by name; none means all of them.

    `binary` has the form of each one listed; `default` is the form of the others. `only_binary`
    if all are to go behind the JSON, and as the model gives them.
    """

    default: bool = False
    listed: Mapping[str, RequestedOutput] = field(default_factory=lambda: NO_PARAMETERS)
    binary: Mapping[str, bool] = field(default_factory=lambda: NO_PARAMETERS)
    only_binary: bool = False

    def wants(self, name: str) -> bool:
        """Whether that output is asked for."""
        return not self.listed or name in self.listed

    def is_binary(self, name: str) -> bool:
        """Whether that output goes behind the JSON rather than into it."""
        return self.binary.get(name, self.default)


def read_outputs(
    found: Members, shared_memory: SharedMemory, *, default: bool
) -> tuple[tuple[RequestedOutput, ...], OutputForms]:
    """The member `outputs` of a request, which may lack it; `default` for those it does not list.

    InferenceError with Triton's texts. A region is located here, so that it stays.
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


MOST_KNOWN = 256
MOST_BYTES = 4096
"""Of one JSON; longer ones take little room in the time that their data takes."""


class KnownRequest(NamedTuple):
    """All that the JSON of a request says, which must not be changed; `size` bytes follow it."""

    size: int
    id: str
    parameters: InferParameters
    pieces: Sequence[BinaryInput]
    outputs: tuple[RequestedOutput, ...]
    forms: OutputForms

    def inputs(self, binary: memoryview) -> tuple[Tensor, ...]:
        """The inputs with these bytes for data, as views of them."""
        return tuple(
            [
                Tensor(name, datatype, shape, binary[start:end])
                for name, datatype, shape, start, end in self.pieces
            ]
        )


class KnownRequests:
    """The latest of those that have been decoded, by their JSON."""

    def __init__(self) -> None:
        self._known: dict[bytes, KnownRequest] = {}

    def get(self, header: bytes, size: int) -> KnownRequest | None:
        """The one with that JSON and so many bytes behind it, if it is known."""
        known = self._known.get(header) if len(header) <= MOST_BYTES else None
        return known if known is not None and known.size == size else None

    def add(self, header: bytes, known: KnownRequest) -> None:
        """Remember one that was decoded well; in place of the one known longest, if need be."""
        if len(header) > MOST_BYTES:
            return
        if len(self._known) >= MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[header] = known


class Target(NamedTuple):
    """Whom a request is for, and what comes beside its body.

    `version` is as asked for; `headers` are those that the model is to get.
    """

    config: ModelConfig
    version: str = ""
    headers: Iterable[tuple[str, str]] = ()
    received_ns: int = 0


class InferDecoder:
    """Decodes requests. What it makes holds views of their bodies, no copies.

    `limit` is the most bytes that an input given in JSON may have.
    """

    def __init__(self, shared_memory: SharedMemory, limit: int) -> None:
        self._shared_memory = shared_memory
        self._limit = limit
        self._known = KnownRequests()

    def decode(
        self, target: Target, header: bytes | memoryview, binary: memoryview
    ) -> tuple[InferRequest, OutputForms]:
        """The request whose JSON is `header`, with the bytes behind it (binary tensor extension).

        Checks what the wire demands, in Triton's order; raises InferenceError.
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
        meaning = KnownRequest(len(binary), request_id, parameters, reader.pieces, outputs, forms)
        request = _request(target, meaning, inputs)
        if (
            isinstance(header, bytes)
            and inputs
            and len(reader.pieces) == len(inputs)
            and not any(each.region for each in outputs)
        ):
            self._known.add(header, meaning)
        return request, forms

    def decode_raw(self, target: Target, body: memoryview) -> tuple[InferRequest, OutputForms]:
        """The request whose body is the data of its only input (raw binary request)."""
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
