"""Parameters of an infer request, and headers that become parameters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.frontends.http.json_object import (
    Members,
    boolean_member,
    string_member,
    unsigned_member,
)
from gateway.messages import Parameter, SequenceTag

MAX_CORRELATION_ID = 128
MAX_INT64 = 2**63 - 1
RESERVED_PREFIX = "triton_"


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

    @property
    def sequence(self) -> SequenceTag | None:
        """The place of the request in its sequence, if it has one."""
        if not self.correlation_id:
            return None
        return SequenceTag(self.correlation_id, self.start, self.end)


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
    for key, value in given.items():
        read = _KNOWN.get(key)
        if read is not None:
            read(parameters, given)
        else:
            parameters.custom[key] = _custom(key, value)
    return parameters


def with_headers(
    custom: Mapping[str, Parameter], headers: Iterable[tuple[str, str]]
) -> Mapping[str, Parameter]:
    """Parameters and forwarded headers together; INVALID_ARG for a header with a reserved name."""
    if not headers:
        return custom
    found = dict(custom)
    for name, value in headers:
        if name in _KNOWN or name == "headers" or name.startswith(RESERVED_PREFIX):
            raise InferenceError(
                Code.INVALID_ARG,
                f"Header '{name}' is reserved for Triton usage and cannot be forwarded.",
            )
        found[name] = value
    return found


def _custom(key: str, value: Any) -> Parameter:
    if key.startswith(RESERVED_PREFIX):
        raise InferenceError(
            Code.INVALID_ARG,
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not "
            "be specified.",
        )
    if isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return value if value <= MAX_INT64 else float(value)
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


_KNOWN = {
    "sequence_id": _read_correlation_id,
    "sequence_start": _read_start,
    "sequence_end": _read_end,
    "priority": _read_priority,
    "timeout": _read_timeout,
    "binary_data_output": _read_binary_output,
}
