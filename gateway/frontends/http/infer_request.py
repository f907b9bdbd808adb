"""Decoding of v2 infer requests: outputs, parameters and the whole request; no I/O."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    unsigned_member,
)
from gateway.messages import (
    MOST_OUTPUTS,
    NO_PARAMETERS,
    Deadline,
    InferRequest,
    Parameter,
    RequestedOutput,
    SequenceTag,
    SharedRegion,
    too_many_outputs,
)
from gateway.policy.caller import Caller, tenant_of
from gateway.policy.forwarding import is_reserved
from gateway.request_memo import MOST_BYTES, RequestMemo
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import Tensor, value

MAX_CORRELATION_ID = 128
MAX_INT64 = 2**63 - 1
RESERVED_PREFIX = "triton_"


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


ALL_OUTPUTS = {binary: OutputForms(binary, only_binary=binary) for binary in (False, True)}
"""The forms of a request that lists no outputs, by its `binary_data_output`."""


def read_outputs(
    found: Members, shared_memory: SharedMemory, *, default: bool
) -> tuple[tuple[RequestedOutput, ...], OutputForms]:
    """The optional member `outputs` of a request; `default` is the form of outputs not listed.

    InferenceError with Triton's texts, and for more than MOST_OUTPUTS outputs. Locating a region
    here keeps it registered.
    """
    if not found.get("outputs", ()):
        if "outputs" in found:
            array_member(found, "outputs")
        return (), ALL_OUTPUTS[default]
    given = array_member(found, "outputs")
    if len(given) > MOST_OUTPUTS:
        raise too_many_outputs(len(given))
    listed: dict[str, RequestedOutput] = {}
    binary: dict[str, bool] = {}
    for each in given:
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


@dataclass(slots=True)
class JsonParameters:
    """The parameters of one request; `custom` are those that the model gets."""

    custom: dict[str, Parameter] = field(default_factory=dict)
    correlation_id: int | str = 0
    start: bool = False
    end: bool = False
    priority: int = 0
    timeout_us: int = 0
    binary_output: bool = False

    def sequence(self, caller: Caller | None) -> SequenceTag | None:
        """The place of a request of that caller in its sequence, if it has one."""
        if not self.correlation_id:
            return None
        return SequenceTag(self.correlation_id, self.start, self.end, tenant_of(caller))


def read_parameters(found: Members) -> JsonParameters:
    """Read the optional member `parameters` of a request; InferenceError with Triton's texts."""
    parameters = JsonParameters()
    if "parameters" not in found:
        return parameters
    given = found["parameters"]
    if type(given) is not dict:
        raise InferenceError(
            Code.INTERNAL, "failed to get request params.: attempt to get members for non-object"
        )
    for key, each in given.items():
        read = _READERS.get(key)
        if read is not None:
            read(parameters, given)
        else:
            parameters.custom[key] = _custom(key, each)
    return parameters


def with_headers(
    custom: Mapping[str, Parameter], headers: Iterable[tuple[str, str]]
) -> Mapping[str, Parameter]:
    """Parameters and forwarded headers together; INVALID_ARG for a name that Triton reserves.

    Other reserved names are dropped.
    """
    found = dict(custom)
    for name, text in headers:
        if name in _READERS or name == "headers" or name.startswith(RESERVED_PREFIX):
            raise InferenceError(
                Code.INVALID_ARG,
                f"Header '{name}' is reserved for Triton usage and cannot be forwarded.",
            )
        if not is_reserved(name):
            found[name] = text
    return found


def _custom(key: str, given: Any) -> Parameter:
    if key.startswith(RESERVED_PREFIX):
        raise InferenceError(
            Code.INVALID_ARG,
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not "
            "be specified.",
        )
    if isinstance(given, bool | str | float):
        return given
    if isinstance(given, int):
        return given if given <= MAX_INT64 else float(given)
    raise InferenceError(
        Code.INVALID_ARG,
        f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.",
    )


def _read_correlation_id(parameters: JsonParameters, given: Members) -> None:
    found = given["sequence_id"]
    if type(found) is int and found >= 0:
        parameters.correlation_id = found
        return
    found = string_member(given, "sequence_id")
    if len(found) > MAX_CORRELATION_ID:
        raise InferenceError(
            Code.UNSUPPORTED,
            f"string correlation ID cannot be longer than {MAX_CORRELATION_ID} characters",
        )
    parameters.correlation_id = found


def _read_start(parameters: JsonParameters, given: Members) -> None:
    parameters.start = boolean_member(given, "sequence_start")


def _read_end(parameters: JsonParameters, given: Members) -> None:
    parameters.end = boolean_member(given, "sequence_end")


def _read_priority(parameters: JsonParameters, given: Members) -> None:
    parameters.priority = unsigned_member(given, "priority")


def _read_timeout(parameters: JsonParameters, given: Members) -> None:
    parameters.timeout_us = unsigned_member(given, "timeout")


def _read_binary_output(parameters: JsonParameters, given: Members) -> None:
    parameters.binary_output = boolean_member(given, "binary_data_output")


_READERS = {
    "sequence_id": _read_correlation_id,
    "sequence_start": _read_start,
    "sequence_end": _read_end,
    "priority": _read_priority,
    "timeout": _read_timeout,
    "binary_data_output": _read_binary_output,
}


class KnownRequest(NamedTuple):
    """The decoded JSON of a request, not to be changed; `size` bytes follow the JSON.

    Clients repeat the JSON and change the binary data.
    """

    size: int
    id: str
    parameters: JsonParameters
    binary_inputs: Sequence[BinaryInput]
    outputs: tuple[RequestedOutput, ...]
    forms: OutputForms


class Target(NamedTuple):
    """The model of a request, and the parts that are not in its body.

    `version` is the requested one; `headers` are those that the model gets as parameters.
    `deadline` is that of its other headers.
    """

    config: ModelConfig
    version: str = ""
    headers: Iterable[tuple[str, str]] = ()
    received_ns: int = 0
    caller: Caller | None = None
    deadline: Deadline | None = None


class InferDecoder:
    """Decodes requests; their inputs are views of the body.

    `limit` is the maximum size in bytes of an input given in JSON.
    """

    def __init__(self, shared_memory: SharedMemory, limit: int) -> None:
        self._shared_memory = shared_memory
        self._limit = limit
        self._known: RequestMemo[bytes, KnownRequest] = RequestMemo()

    def decode(
        self, target: Target, header: bytes | memoryview, binary: memoryview
    ) -> tuple[InferRequest, OutputForms]:
        """The request with the JSON `header` and binary data (binary tensor data extension).

        Checks the rules of the wire in Triton's order; raises InferenceError.
        """
        if not isinstance(header, bytes) or len(header) > MOST_BYTES:
            return self._read(target, header, binary)
        known = self._known.get(header)
        if known is None or known.size != len(binary):
            return self._read(target, header, binary)
        inputs = []
        for name, datatype, shape, start, end in known.binary_inputs:
            inputs.append(Tensor(name, datatype, shape, binary[start:end]))
        return _request(target, known, tuple(inputs)), known.forms

    def _read(
        self, target: Target, header: bytes | memoryview, binary: memoryview
    ) -> tuple[InferRequest, OutputForms]:
        found = parse_request(header)
        request_id = string_member(found, "id") if "id" in found else ""
        parameters = read_parameters(found)
        shared_memory = self._shared_memory.of(target.caller)
        reader = InferInputReader(target.config, binary, shared_memory, self._limit)
        inputs = reader.read(found, request_id)
        outputs, forms = read_outputs(found, shared_memory, default=parameters.binary_output)
        meaning = KnownRequest(
            len(binary), request_id, parameters, reader.binary_inputs, outputs, forms
        )
        request = _request(target, meaning, inputs)
        if (
            isinstance(header, bytes)
            and len(header) <= MOST_BYTES
            and inputs
            and len(reader.binary_inputs) == len(inputs)
            and not any(each.region for each in outputs)
        ):
            self._known[header] = meaning
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
            caller=target.caller,
            deadline=target.deadline,
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
        parameters=with_headers(parameters.custom, target.headers)
        if target.headers
        else parameters.custom,
        sequence=parameters.sequence(target.caller) if parameters.correlation_id else None,
        priority=parameters.priority,
        timeout_us=parameters.timeout_us,
        received_ns=target.received_ns,
        caller=target.caller,
        deadline=target.deadline,
    )


def decoupled() -> InferenceError:
    """The refusal of a model whose number of responses is not one."""
    return InferenceError(
        Code.UNSUPPORTED, "HTTP end point doesn't support models with decoupled transaction policy"
    )
