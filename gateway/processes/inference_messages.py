"""Encoding of requests, responses and errors between processes of Sluice, as MessagePack.

The structs are arrays. They grow at the end only, with defaults: a release reads the messages of
the release before it, and of the one after it.
"""

from typing import Any, Self

import msgspec

from gateway.errors import AnsweredError, Code, InferenceError
from gateway.messages import (
    NO_PARAMETERS,
    InferRequest,
    InferResponse,
    Parameter,
    Phases,
    RequestedOutput,
    SequenceTag,
    Usage,
)
from gateway.openai_contract import OpenAiRefusal
from gateway.policy.caller import Caller, tenant_of
from gateway.tensor import Datatype, Tensor, value


class _Array(msgspec.Struct, array_like=True, gc=False):
    """An array of fields; without cycles it needs no garbage collector."""


class _Tensor(_Array):
    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    data: bytes | tuple[bytes, ...]


class _Output(_Array):
    name: str
    classes: int = 0


class _Sequence(_Array):
    correlation_id: int | str
    start: bool
    end: bool


class _Request(_Array):
    model: str
    version: str
    id: str
    inputs: tuple[_Tensor, ...]
    parameters: dict[str, Any]
    tenant: str
    outputs: tuple[_Output, ...] = ()
    sequence: _Sequence | None = None
    priority: int = 0
    timeout_us: int = 0
    traceparent: str | None = None


class _Error(_Array):
    code: Code
    message: str
    status: int = 0
    body: bytes = b""
    answered: bool = False


class _Response(_Array):
    final: bool
    outputs: tuple[_Tensor, ...]
    parameters: dict[str, Parameter] | None
    usage: tuple[int, int, str] | None
    phases: tuple[int, int, int] | None = None
    error: _Error | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(_Request).decode
_decode_response = msgspec.msgpack.Decoder(_Response).decode
_decode_error = msgspec.msgpack.Decoder(_Error).decode

UNWRITABLE = (OverflowError, RecursionError, TypeError, ValueError)
"""The errors of values that MessagePack cannot encode."""


@value
class TraceParent:
    """A `traceparent` (W3C Trace Context, 3.2): the parent of the traces of a request."""

    text: str

    def child(self) -> Self:
        """The parent of a request that a model makes for this one."""
        return self


def write_request(request: InferRequest, waited_us: int = 0) -> bytes:
    """A request as bytes; INVALID_ARG if a parameter has no encoding.

    Its timeout is sent as the time left after `waited_us`, at least 1, because clocks of machines
    differ. Of its caller only the tenant is sent: the sender has checked the rights. Of its trace a
    `TraceParent` is sent, of its outputs no region: the sender writes to shared memory.
    """
    outputs, tag, trace = request.outputs, request.sequence, request.trace
    timeout_us = request.timeout_us
    written = _Request(
        request.model,
        request.version,
        request.id,
        tuple(map(_written, request.inputs)),
        dict(request.parameters),
        tenant_of(request.caller),
        tuple([_Output(each.name, each.classes) for each in outputs]) if outputs else (),
        None if tag is None else _Sequence(tag.correlation_id, tag.start, tag.end),
        request.priority,
        max(timeout_us - waited_us, 1) if timeout_us else 0,
        trace.text if isinstance(trace, TraceParent) else None,
    )
    try:
        return _encode(written)
    except UNWRITABLE as error:
        raise InferenceError(
            Code.INVALID_ARG,
            f"model '{request.model}': the parameters of the request cannot be read: {error}",
        ) from error


def read_request(payload: bytes) -> InferRequest:
    """The request that `write_request` encoded; its sequence has the tenant of its caller."""
    found = _decode_request(payload)
    tenant, tag, trace = found.tenant, found.sequence, found.traceparent
    return InferRequest(
        model=found.model,
        version=found.version,
        id=found.id,
        inputs=tuple(map(_read, found.inputs)),
        outputs=tuple([RequestedOutput(each.name, each.classes) for each in found.outputs]),
        parameters=found.parameters,
        sequence=None
        if tag is None
        else SequenceTag(tag.correlation_id, tag.start, tag.end, tenant),
        priority=found.priority,
        timeout_us=found.timeout_us,
        trace=None if trace is None else TraceParent(trace),
        caller=Caller(tenant=tenant) if tenant else None,
    )


def write_response(response: InferResponse) -> bytes:
    """A response as bytes."""
    parameters, error = response.parameters, response.error
    return _encode(
        _Response(
            response.final,
            tuple(map(_written, response.outputs)),
            dict(parameters) if parameters else None,
            None if response.usage is None else _written_usage(response.usage),
            None if response.phases is None else _written_phases(response.phases),
            None if error is None else _written_error(error),
        )
    )


def read_response(payload: bytes) -> InferResponse:
    """The response that `write_response` encoded."""
    found = _decode_response(payload)
    error = found.error
    return InferResponse(
        outputs=tuple(map(_read, found.outputs)),
        parameters=found.parameters or NO_PARAMETERS,
        final=found.final,
        usage=found.usage and Usage(*found.usage),
        phases=found.phases and Phases(*found.phases),
        error=None if error is None else _read_error(error),
    )


def write_error(error: InferenceError) -> bytes:
    """An error as bytes, with its OpenAI form if it has one."""
    return _encode(_written_error(error))


def read_error(payload: bytes) -> InferenceError:
    """The error that `write_error` encoded."""
    return _read_error(_decode_error(payload))


def _written(tensor: Tensor) -> _Tensor:
    data: Any = tensor.data if isinstance(tensor.data, tuple) else tensor.raw()
    return _Tensor(tensor.name, tensor.datatype, tensor.shape, data)


def _read(found: _Tensor) -> Tensor:
    return Tensor(found.name, found.datatype, found.shape, found.data)


def _written_usage(usage: Usage) -> tuple[int, int, str]:
    return usage.prompt_tokens, usage.completion_tokens, usage.finish_reason


def _written_phases(phases: Phases) -> tuple[int, int, int]:
    return phases.input_ns, phases.infer_ns, phases.output_ns


def _written_error(error: InferenceError) -> _Error:
    # UTF-8 has no lone surrogates, which names of a client may have.
    message = error.message.encode("utf-8", "replace").decode()
    if isinstance(error, OpenAiRefusal):
        return _Error(error.code, message, error.status, error.body)
    return _Error(error.code, message, answered=isinstance(error, AnsweredError))


def _read_error(found: _Error) -> InferenceError:
    if found.status:
        return OpenAiRefusal(found.code, found.message, status=found.status, body=found.body)
    kind = AnsweredError if found.answered else InferenceError
    return kind(found.code, found.message)
