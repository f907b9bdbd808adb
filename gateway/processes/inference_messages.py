"""Encoding of requests, responses and errors between processes of Sluice, as MessagePack."""

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.errors import Code, InferenceError
from gateway.messages import NO_PARAMETERS, InferRequest, InferResponse, Parameter, Usage
from gateway.openai_contract import OpenAiRefusal
from gateway.policy.caller import Caller, tenant_of
from gateway.tensor import Datatype, Tensor


class _Tensor(msgspec.Struct, array_like=True):
    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    data: bytes | tuple[bytes, ...]


class _Request(msgspec.Struct, array_like=True):
    model: str
    version: str
    id: str
    inputs: tuple[_Tensor, ...]
    parameters: dict[str, Any]
    tenant: str


class _Response(msgspec.Struct, array_like=True):
    final: bool
    outputs: tuple[_Tensor, ...]
    parameters: dict[str, Parameter] | None
    usage: tuple[int, int, str] | None


class _Refusal(msgspec.Struct, array_like=True):
    code: Code
    message: str
    status: int = 0
    body: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(_Request).decode
_response = msgspec.msgpack.Decoder(_Response).decode
_refusal = msgspec.msgpack.Decoder(_Refusal).decode


def write_request(request: InferRequest) -> bytes:
    """A request as bytes; INVALID_ARG if a number is too large."""
    inputs = tuple(map(_written, request.inputs))
    parameters, tenant = dict(request.parameters), tenant_of(request.caller)
    found = _Request(request.model, request.version, request.id, inputs, parameters, tenant)
    try:
        return _encode(found)
    except (OverflowError, TypeError) as error:
        raise InferenceError(
            Code.INVALID_ARG,
            f"model '{request.model}': the parameters of the request cannot be read: {error}",
        ) from error


def read_request(payload: bytes) -> InferRequest:
    """The request that `write_request` encoded."""
    found = _request(payload)
    return InferRequest(
        model=found.model,
        version=found.version,
        id=found.id,
        inputs=tuple(map(_read, found.inputs)),
        parameters=found.parameters,
        caller=Caller(tenant=found.tenant) if found.tenant else None,
    )


def write_response(response: InferResponse) -> bytes:
    """A response as bytes, without its phases."""
    outputs = tuple(map(_written, response.outputs))
    parameters = dict(response.parameters) if response.parameters else None
    used = response.usage
    usage = None
    if used is not None:
        usage = used.prompt_tokens, used.completion_tokens, used.finish_reason
    return _encode(_Response(response.final, outputs, parameters, usage))


def read_response(payload: bytes) -> InferResponse:
    """The response that `write_response` encoded."""
    found = _response(payload)
    parameters: Mapping[str, Parameter] = found.parameters or NO_PARAMETERS
    return InferResponse(
        outputs=tuple(map(_read, found.outputs)),
        parameters=parameters,
        final=found.final,
        usage=found.usage and Usage(*found.usage),
    )


def write_error(error: InferenceError) -> bytes:
    """An error as bytes, with its OpenAI form if it has one."""
    if isinstance(error, OpenAiRefusal):
        return _encode(_Refusal(error.code, error.message, error.status, error.body))
    return _encode(_Refusal(error.code, error.message))


def read_error(payload: bytes) -> InferenceError:
    """The error that `write_error` encoded."""
    found = _refusal(payload)
    if found.status:
        return OpenAiRefusal(found.code, found.message, status=found.status, body=found.body)
    return InferenceError(found.code, found.message)


def _written(tensor: Tensor) -> _Tensor:
    data: Any = tensor.data if isinstance(tensor.data, tuple) else tensor.raw()
    return _Tensor(tensor.name, tensor.datatype, tensor.shape, data)


def _read(tensor: _Tensor) -> Tensor:
    return Tensor(tensor.name, tensor.datatype, tensor.shape, tensor.data)
