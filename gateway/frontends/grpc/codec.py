"""Protobuf to messages and back; no I/O."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, Parameter, RequestedOutput, SequenceTag
from gateway.protos import grpc_service_pb2 as pb
from gateway.tensor import NUMPY_TYPES, Datatype, Tensor

EMPTY_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"
RESERVED_PREFIX = "triton_"
MAX_CORRELATION_ID = 128

CONTENTS = {
    Datatype.BOOL: "bool_contents",
    Datatype.INT8: "int_contents",
    Datatype.INT16: "int_contents",
    Datatype.INT32: "int_contents",
    Datatype.INT64: "int64_contents",
    Datatype.UINT8: "uint_contents",
    Datatype.UINT16: "uint_contents",
    Datatype.UINT32: "uint_contents",
    Datatype.UINT64: "uint64_contents",
    Datatype.FP32: "fp32_contents",
    Datatype.FP64: "fp64_contents",
    Datatype.BYTES: "bytes_contents",
}
"""Which field of InferTensorContents carries a datatype; FP16 and BF16 travel raw only."""

WIDEST = {contents: datatype for datatype, contents in CONTENTS.items()}
"""The datatype of each field: its elements', and what a field that does not fit is called."""


@dataclass(slots=True)
class _Parameters:
    """Request parameters, the scheduling ones told from the client's own."""

    custom: dict[str, Parameter] = field(default_factory=dict)
    sequence: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0


def decode_request(message: pb.ModelInferRequest) -> InferRequest:
    """A ModelInferRequest as it came; InferenceError with Triton's texts."""
    received_ns = time.perf_counter_ns()
    parameters = _decode_parameters(message.parameters)
    return InferRequest(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        inputs=tuple(_decode_inputs(message)),
        outputs=tuple(RequestedOutput(output.name) for output in message.outputs),
        parameters=parameters.custom,
        sequence=_sequence(parameters.sequence),
        priority=parameters.priority,
        timeout_us=parameters.timeout_us,
        received_ns=received_ns,
    )


def wants_empty_final(message: pb.ModelInferRequest) -> bool:
    """Whether a flag-only final response is to be sent (decoupled models)."""
    return (
        message.parameters[EMPTY_FINAL].bool_param if EMPTY_FINAL in message.parameters else False
    )


def encode_response(
    response: InferResponse, model: str, version: str, request_id: str
) -> pb.ModelInferResponse:
    """Outputs in the model's order, each with its raw contents."""
    message = pb.ModelInferResponse(model_name=model, model_version=version, id=request_id)
    for key, value in response.parameters.items():
        _set_parameter(message.parameters[key], value)
    for output in response.outputs:
        message.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        message.raw_output_contents.append(bytes(output.raw()))
    return message


def _decode_inputs(message: pb.ModelInferRequest) -> Iterator[Tensor]:
    raw = iter(message.raw_input_contents)
    has_raw = bool(message.raw_input_contents)
    for tensor in message.inputs:
        if "shared_memory_region" in tensor.parameters:
            raise InferenceError(
                Code.UNSUPPORTED,
                f"input '{tensor.name}' is in shared memory, which this server does not offer",
            )
        datatype = _datatype(tensor.datatype, tensor.name, message.model_name)
        shape = tuple(tensor.shape)
        if not has_raw:
            yield Tensor(tensor.name, datatype, shape, _contents(tensor, datatype, message))
            continue
        if tensor.HasField("contents"):
            raise InferenceError(
                Code.INVALID_ARG,
                "contents field must not be specified when using raw_input_contents for "
                f"'{tensor.name}' for model '{message.model_name}'",
            )
        data = next(raw, None)
        if data is None:
            raise _without_data(tensor.name, message.model_name)
        yield Tensor(tensor.name, datatype, shape, data)


def _datatype(name: str, tensor: str, model: str) -> Datatype:
    try:
        return Datatype(name)
    except ValueError:
        raise InferenceError(
            Code.INVALID_ARG,
            f"inference input '{tensor}' for model '{model}' has data-type '{name}', expected one "
            f"of {', '.join(Datatype)}",
        ) from None


def _contents(tensor: Any, datatype: Datatype, message: pb.ModelInferRequest) -> Any:
    populated = [found.name for found, _ in tensor.contents.ListFields()]
    if not populated:
        if 0 in tensor.shape:
            return b""
        raise _without_data(tensor.name, message.model_name)
    if populated != [CONTENTS.get(datatype)]:
        raise _unexpected_contents(tensor.name, datatype, populated[0], message.model_name)
    values = getattr(tensor.contents, populated[0])
    if datatype is Datatype.BYTES:
        return tuple(values)
    # Without its type, numpy makes floats of integers of which some fit only uint64.
    found = np.array(values, dtype=NUMPY_TYPES[WIDEST[populated[0]]])
    return found.astype(NUMPY_TYPES[datatype]).tobytes()


def _unexpected_contents(tensor: str, datatype: Datatype, first: str, model: str) -> InferenceError:
    what = ", binary data was already supplied."
    if first != CONTENTS.get(datatype):
        what = f" of type '{WIDEST[first]}', expected datatype '{datatype}'"
    text = f"unexpected explicit tensor data for input tensor '{tensor}' for model '{model}'{what}"
    return InferenceError(Code.INVALID_ARG, text)


def _without_data(tensor: str, model: str) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f"unable to find data for input tensor '{tensor}' for model '{model}' in request.",
    )


def _decode_parameters(found: Mapping[str, pb.InferParameter]) -> _Parameters:
    parameters = _Parameters()
    for key, value in found.items():
        reader = _KNOWN.get(key)
        if reader is not None:
            reader(parameters, key, value)
        elif key.startswith(RESERVED_PREFIX):
            raise InferenceError(
                Code.INVALID_ARG,
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the "
                f"following keys starting with 'triton_' are allowed: {EMPTY_FINAL}",
            )
        else:
            parameters.custom[key] = _custom(key, value)
    return parameters


def _custom(key: str, value: pb.InferParameter) -> Parameter:
    kind = value.WhichOneof("parameter_choice")
    if kind in (None, "uint64_param"):
        raise InferenceError(
            Code.INVALID_ARG,
            f"invalid value type for '{key}' parameter, expected int64_param, bool_param, or "
            "string_param.",
        )
    found: Parameter = getattr(value, kind)
    return found


def _of_kind(key: str, value: pb.InferParameter, *kinds: str) -> Any:
    kind = value.WhichOneof("parameter_choice")
    if kind not in kinds:
        raise InferenceError(
            Code.INVALID_ARG,
            f"invalid value type for '{key}' parameter, expected {' or '.join(kinds)}.",
        )
    return getattr(value, kind)


def _read_flag(parameters: _Parameters, key: str, value: pb.InferParameter) -> None:
    parameters.sequence[key] = _of_kind(key, value, "bool_param")


def _read_empty_final(parameters: _Parameters, key: str, value: pb.InferParameter) -> None:
    _of_kind(key, value, "bool_param")


def _read_correlation_id(parameters: _Parameters, key: str, value: pb.InferParameter) -> None:
    found = _of_kind(key, value, "int64_param", "string_param")
    if isinstance(found, str) and len(found) > MAX_CORRELATION_ID:
        raise InferenceError(
            Code.UNSUPPORTED,
            f"string correlation ID cannot be longer than {MAX_CORRELATION_ID} characters",
        )
    parameters.sequence[key] = found


def _read_priority(parameters: _Parameters, key: str, value: pb.InferParameter) -> None:
    found = _of_kind(key, value, "int64_param", "uint64_param")
    if found < 0:
        raise InferenceError(Code.INVALID_ARG, "invalid value for 'priority', expected value >= 0.")
    parameters.priority = found


def _read_timeout(parameters: _Parameters, key: str, value: pb.InferParameter) -> None:
    parameters.timeout_us = _of_kind(key, value, "int64_param")


_KNOWN = {
    "sequence_id": _read_correlation_id,
    "sequence_start": _read_flag,
    "sequence_end": _read_flag,
    "priority": _read_priority,
    "timeout": _read_timeout,
    EMPTY_FINAL: _read_empty_final,
}


def _sequence(found: Mapping[str, Any]) -> SequenceTag | None:
    correlation_id = found.get("sequence_id", 0)
    if not correlation_id:
        return None
    return SequenceTag(
        correlation_id, found.get("sequence_start", False), found.get("sequence_end", False)
    )


def _set_parameter(target: pb.InferParameter, value: Parameter) -> None:
    if isinstance(value, bool):
        target.bool_param = value
    elif isinstance(value, int):
        target.int64_param = value
    elif isinstance(value, float):
        target.double_param = value
    else:
        target.string_param = value
