"""Requests, responses and errors as bytes, and what a client is told and tells at its start.

MessagePack, as vLLM has it between its own processes; both ends are this version of the gateway.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import orjson

from backends.vllm.settings import EngineModel
from gateway.errors import Code, InferenceError
from gateway.messages import NO_PARAMETERS, InferRequest, InferResponse, Parameter, Usage
from gateway.openai_exchange import OpenAiRefusal
from gateway.processes import frames
from gateway.tensor import Datatype, Tensor

OMITTED = frozenset({"args", "exc_info", "exc_text", "stack_info", "msg"})
"""What cannot be told of a record, or is told in other words."""

_formatter = logging.Formatter()


class ClientSettings(msgspec.Struct, array_like=True):
    """What a client must know: the model, which client it is, and how it reaches the engine.

    `addresses` are vLLM's, by its names; `input_fd` and `output_fd` listen at two of them already.
    `counters` is the file where all clients of the engine count the requests that each has.
    """

    model: EngineModel
    index: int
    addresses: dict[str, str]
    input_fd: int
    output_fd: int
    counters: str
    debug: bool


class Offer(msgspec.Struct, array_like=True):
    """What a client that is ready has to tell of its instance."""

    adapters: tuple[str, ...]
    max_model_len: int


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
_settings = msgspec.msgpack.Decoder(ClientSettings).decode
_offer = msgspec.msgpack.Decoder(Offer).decode
_request = msgspec.msgpack.Decoder(_Request).decode
_response = msgspec.msgpack.Decoder(_Response).decode
_refusal = msgspec.msgpack.Decoder(_Refusal).decode


def write(value: ClientSettings | Offer) -> bytes:
    """Settings or an offer as bytes."""
    return _encode(value)


def read_settings(payload: bytes) -> ClientSettings:
    """What `write` made of settings."""
    return _settings(payload)


def read_offer(payload: bytes) -> Offer:
    """What `write` made of an offer."""
    return _offer(payload)


def write_request(request: InferRequest) -> bytes:
    """What an engine reads of a request; INVALID_ARG if a number in it is too large."""
    inputs = tuple(map(_written, request.inputs))
    parameters = dict(request.parameters)
    try:
        return _encode(_Request(request.model, request.version, request.id, inputs, parameters))
    except (OverflowError, TypeError) as error:
        raise InferenceError(
            Code.INVALID_ARG,
            f"model '{request.model}': the parameters of the request cannot be read: {error}",
        ) from error


def read_request(payload: bytes) -> InferRequest:
    """The request that `write_request` was given, as far as an engine reads it."""
    found = _request(payload)
    return InferRequest(
        model=found.model,
        version=found.version,
        id=found.id,
        inputs=tuple(map(_read, found.inputs)),
        parameters=found.parameters,
    )


def write_response(response: InferResponse) -> bytes:
    """A response; its phases are not told, an engine has none."""
    outputs = tuple(map(_written, response.outputs))
    parameters = dict(response.parameters) if response.parameters else None
    used = response.usage
    told = None
    if used is not None:
        told = used.prompt_tokens, used.completion_tokens, used.finish_reason
    return _encode(_Response(response.final, outputs, parameters, told))


def read_response(payload: bytes) -> InferResponse:
    """The response that `write_response` was given."""
    found = _response(payload)
    parameters: Mapping[str, Parameter] = found.parameters or NO_PARAMETERS
    return InferResponse(
        outputs=tuple(map(_read, found.outputs)),
        parameters=parameters,
        final=found.final,
        usage=found.usage and Usage(*found.usage),
    )


def write_error(error: InferenceError) -> bytes:
    """An error, with OpenAI's form of it if it has one."""
    if isinstance(error, OpenAiRefusal):
        return _encode(_Refusal(error.code, error.message, error.status, error.body))
    return _encode(_Refusal(error.code, error.message))


def read_error(payload: bytes) -> InferenceError:
    """The error that `write_error` was given."""
    found = _refusal(payload)
    if found.status:
        return OpenAiRefusal(found.code, found.message, status=found.status, body=found.body)
    return InferenceError(found.code, found.message)


def _written(tensor: Tensor) -> _Tensor:
    data: Any = tensor.data if isinstance(tensor.data, tuple) else tensor.raw()
    return _Tensor(tensor.name, tensor.datatype, tensor.shape, data)


def _read(tensor: _Tensor) -> Tensor:
    return Tensor(tensor.name, tensor.datatype, tensor.shape, tensor.data)


class ClientKind(frames.Kind):
    """A piece of DATA is one response; numbers of calls are the server's."""

    SETTINGS = 16  # to a client, first of all: `ClientSettings`
    READY = 17  # `Offer`
    FAILED = 18  # an error: the client cannot serve
    REQUEST = 19  # a call begins: a request
    REFUSED = 20  # a call ends: an error
    WASTED = 21  # so many tokens had been made when nobody waited any more: a number
    STOPPED = 22  # the engine has stopped: why, as text
    LOG = 23  # a record of the client's log


class RecordSender(logging.Handler):
    """Tells what is logged in this process, by whichever thread, on its event loop."""

    def __init__(self, tell: Callable[[bytes], None]) -> None:
        super().__init__()
        self._tell = tell
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        """Tell it; once the loop has ended nobody hears it."""
        try:
            told = orjson.dumps(_fields(record), default=str, option=orjson.OPT_NON_STR_KEYS)
        except (TypeError, ValueError):
            self.handleError(record)
            return
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, told)


def relay(payload: bytes) -> None:
    """Log here what has been logged there."""
    record = logging.makeLogRecord(orjson.loads(payload))
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    told = {key: value for key, value in vars(record).items() if key not in OMITTED}
    told["msg"] = record.getMessage()
    if record.exc_info:
        told["trace"] = _formatter.formatException(record.exc_info)
    return told
