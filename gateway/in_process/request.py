"""Requests of a program: from the keywords of a call to an InferRequest."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypedDict

import numpy.typing as npt

from gateway.arrays import fitted, listed_tensor, typed_tensor
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.generation import SAMPLING_PARAMETERS
from gateway.messages import (
    NO_PARAMETERS,
    InferRequest,
    RequestedOutput,
    SequenceTag,
    asked_once,
)
from gateway.tensor import Tensor

MAX_CORRELATION_ID = 128
MAX_UNSIGNED = 2**64 - 1
RESERVED_PREFIX = "triton_"

Value = npt.NDArray[Any] | Sequence[Any]


class RequestFields(TypedDict, total=False):
    """The keywords of a request, with the names of Triton's in-process API.

    `inputs`: arrays, or lists of str, bytes, numbers or booleans, by the input's name; shapes
    include the batch dimension. Arrays are read in place: do not write to them before the last
    response. `outputs`: names, by default all. `timeout` is in microseconds; `timeout` and
    `priority` 0 mean the model's default. `correlation_id` 0 or "" means no sequence.
    """

    inputs: Mapping[str, Value]
    outputs: Sequence[str]
    parameters: Mapping[str, Any]
    request_id: str
    correlation_id: int | str
    sequence_start: bool
    sequence_end: bool
    priority: int
    timeout: int


@dataclass(frozen=True, slots=True)
class RequestDraft:
    """A request before its model is known; `lists` are inputs without a datatype yet."""

    request: InferRequest
    lists: Mapping[str, Any]

    def complete(self, config: ModelConfig) -> InferRequest:
        """The request for that model; INVALID_ARG for inputs that do not fit it."""
        self._check_parameters(config)
        if not self.lists and not any(each.data_type == "TYPE_BF16" for each in config.input):
            return self.request
        declared = {each.name: each for each in config.input}
        known = [each for each in self.request.inputs if each.name in declared]
        inputs = [each for each in self.request.inputs if each.name not in declared]
        inputs += [fitted(each, declared[each.name]) for each in known]
        for name, values in self.lists.items():
            if name not in declared:
                _refuse(f"unexpected inference input '{name}' for model '{config.name}'")
            inputs.append(listed_tensor(declared[name], values))
        return replace(self.request, inputs=tuple(inputs))

    def _check_parameters(self, config: ModelConfig) -> None:
        for name, value in self.request.parameters.items():
            if isinstance(value, str | int | float):
                continue
            if all(each.name != SAMPLING_PARAMETERS for each in config.input):
                found = type(value).__name__
                _refuse(f"parameter '{name}' is {found}, expected str, int, float or bool")


def draft(model: str, version: str, fields: RequestFields) -> RequestDraft:
    """Read the keywords of a call; INVALID_ARG for values that fit no model."""

    received_ns = time.perf_counter_ns()
    if unknown := fields.keys() - RequestFields.__annotations__.keys():
        known = ", ".join(RequestFields.__annotations__)
        _refuse(f"a request has no '{min(unknown)}', expected one of {known}")
    tensors, lists = _inputs(fields.get("inputs", {}))
    request = InferRequest(
        model=model,
        version=version,
        id=_text(fields.get("request_id", ""), "request_id"),
        inputs=tensors,
        outputs=_outputs(fields.get("outputs", ())),
        parameters=_parameters(fields.get("parameters")),
        sequence=_sequence(fields),
        priority=_unsigned(fields.get("priority", 0), "priority"),
        timeout_us=_unsigned(fields.get("timeout", 0), "timeout"),
        received_ns=received_ns,
    )
    return RequestDraft(request, lists)


def _inputs(given: Mapping[str, Value]) -> tuple[tuple[Tensor, ...], Mapping[str, Any]]:
    if not isinstance(given, Mapping):
        _refuse(f"inputs is {type(given).__name__}, expected a mapping from names to arrays")
    tensors, lists = [], {}
    for name, value in given.items():
        tensor = typed_tensor(_text(name, "the name of an input"), value)
        if tensor is None:
            lists[name] = value
        else:
            tensors.append(tensor)
    return tuple(tensors), lists


def _outputs(given: Sequence[str]) -> tuple[RequestedOutput, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        _refuse(f"outputs is {given!r}, expected a sequence of names")
    return asked_once([RequestedOutput(_text(name, "the name of an output")) for name in given])


def _parameters(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if not given:
        return NO_PARAMETERS
    if not isinstance(given, Mapping):
        _refuse(f"parameters is {type(given).__name__}, expected a mapping from names to values")
    for name in given:
        if _text(name, "the name of a parameter").startswith(RESERVED_PREFIX):
            _refuse(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should "
                "not be specified."
            )
    return dict(given)


def _sequence(fields: RequestFields) -> SequenceTag | None:
    found = fields.get("correlation_id", 0)
    if not found:
        return None
    if not isinstance(found, int | str) or (isinstance(found, int) and not _is_unsigned(found)):
        _refuse(
            f"correlation_id is {found!r}, expected a text or a whole number from 0 to 2^64 - 1"
        )
    if isinstance(found, str) and len(found) > MAX_CORRELATION_ID:
        raise InferenceError(
            Code.UNSUPPORTED,
            f"string correlation ID cannot be longer than {MAX_CORRELATION_ID} characters",
        )
    start = _flag(fields.get("sequence_start", False), "sequence_start")
    return SequenceTag(found, start, _flag(fields.get("sequence_end", False), "sequence_end"))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        _refuse(f"{name} is {value!r}, expected a str")
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        _refuse(f"{name} is {value!r}, expected a bool")
    return value


def _unsigned(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not _is_unsigned(value):
        _refuse(f"{name} is {value!r}, expected a whole number from 0 to 2^64 - 1")
    return value


def _is_unsigned(value: int) -> bool:
    return 0 <= value <= MAX_UNSIGNED


def _refuse(message: str) -> NoReturn:
    raise InferenceError(Code.INVALID_ARG, message)
