"""Messages between the server and the clients of a shared engine, and both ends of a call.

The encoding is MessagePack, as between vLLM's own processes; both ends have the same version.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
import orjson

from backends.vllm.settings import EngineModel
from gateway.backend import Instance
from gateway.errors import Code, InferenceError, unexpected
from gateway.messages import NO_PARAMETERS, InferRequest, InferResponse, Parameter, Usage
from gateway.openai_contract import OpenAiRefusal
from gateway.policy.caller import Caller, tenant_of
from gateway.processes.channel import Channel, ChannelCall, Frame, FrameKind
from gateway.tensor import Datatype, Tensor

OMITTED = frozenset({"args", "exc_info", "exc_text", "stack_info", "msg"})
"""Attributes of a log record that are not sent, or sent in another form."""

_formatter = logging.Formatter()

log = logging.getLogger("sluice.vllm")


class ClientSettings(msgspec.Struct, array_like=True):
    """Settings of a client: the model, its index, and the engine's addresses.

    `addresses` has vLLM's names as keys; `input_fd` and `output_fd` already listen at two of them.
    `counters` is the file with the numbers of requests of all clients.
    """

    model: EngineModel
    index: int
    addresses: dict[str, str]
    input_fd: int
    output_fd: int
    counters: str
    debug: bool


class Offer(msgspec.Struct, array_like=True):
    """Properties of the instance of a ready client."""

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
_settings = msgspec.msgpack.Decoder(ClientSettings).decode
_offer = msgspec.msgpack.Decoder(Offer).decode
_request = msgspec.msgpack.Decoder(_Request).decode
_response = msgspec.msgpack.Decoder(_Response).decode
_refusal = msgspec.msgpack.Decoder(_Refusal).decode


def write(value: ClientSettings | Offer) -> bytes:
    """Settings or an offer as bytes."""
    return _encode(value)


def read_settings(payload: bytes) -> ClientSettings:
    """The settings that `write` encoded."""
    return _settings(payload)


def read_offer(payload: bytes) -> Offer:
    """The offer that `write` encoded."""
    return _offer(payload)


def write_request(request: InferRequest) -> bytes:
    """The parts of a request that an engine reads; INVALID_ARG if a number is too large."""
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
    """A response without its phases, which an engine does not have."""
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
    """An error, with its OpenAI form if it has one."""
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


class ClientKind(FrameKind):
    """Kinds of frames between the server and a client.

    A frame of DATA is one response; the server numbers the calls.
    """

    SETTINGS = 16  # `ClientSettings`: the first frame to a client
    READY = 17  # `Offer`
    FAILED = 18  # an error: the client cannot serve
    REQUEST = 19  # starts a call: a request
    REFUSED = 20  # ends a call: an error
    WASTED = 21  # the number of tokens made for a cancelled request
    STOPPED = 22  # the reason, as text: the engine has stopped
    LOG = 23  # a log record of the client


class RecordSender(logging.Handler):
    """Sends log records of all threads of this process, on its event loop."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; dropped if the event loop is closed."""
        try:
            payload = orjson.dumps(_fields(record), default=str, option=orjson.OPT_NON_STR_KEYS)
        except (TypeError, ValueError):
            self.handleError(record)
            return
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send, payload)


def relay(payload: bytes) -> None:
    """Log a received record in this process."""
    record = logging.makeLogRecord(orjson.loads(payload))
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields = {key: value for key, value in vars(record).items() if key not in OMITTED}
    fields["msg"] = record.getMessage()
    if record.exc_info:
        fields["trace"] = _formatter.formatException(record.exc_info)
    return fields


def tokens(frame: Frame) -> int:
    """The number of completion tokens in a frame."""
    usage = read_response(frame.payload).usage if frame.kind == ClientKind.DATA else None
    return 0 if usage is None else usage.completion_tokens


class EngineCall(ChannelCall):
    """The server's end: sends the request when it is created.

    One task reads `responses`; then `leave` ends the call.
    """

    def __init__(self, channel: Channel, call: int, request: InferRequest) -> None:
        super().__init__(channel, call)
        self._model = request.model
        self._frames: deque[Frame] = deque()
        self._is_lost = False
        self._is_over = False
        payload = write_request(request)
        channel.join(call, self)
        channel.send(ClientKind.REQUEST, call, payload)

    async def responses(self) -> AsyncGenerator[InferResponse, None]:
        """The responses; InferenceError if the request is refused, or the client exits."""
        while not self._is_over:
            frame = await self._next()
            if frame.kind == ClientKind.DATA:
                self._passed_on(len(frame.payload))
                yield read_response(frame.payload)
                continue
            self._is_over = True
            if frame.kind == ClientKind.REFUSED:
                raise read_error(frame.payload)
            if frame.kind == ClientKind.ABORT:
                raise unexpected()

    def leave(self) -> int:
        """End the call; returns the number of received unread tokens."""
        self._channel.leave(self._call)
        if self._is_over or self._is_lost:
            return 0
        self._channel.send(ClientKind.GONE, self._call)
        return sum(map(tokens, self._frames))

    def lose(self) -> None:
        self._is_lost = True
        self._wake()

    def _take(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._wake()

    async def _next(self) -> Frame:
        while not self._frames:
            if self._is_lost:
                raise InferenceError(
                    Code.UNAVAILABLE,
                    f"model '{self._model}': its engine has stopped; retry shortly",
                )
            await self._news()
        return self._frames.popleft()


class ServedCall(ChannelCall):
    """The client's end: `task` answers the request, and GONE or ABORT cancels it."""

    def __init__(self, channel: Channel, call: int, payload: bytes) -> None:
        super().__init__(channel, call)
        self.task: asyncio.Task[None] | None = None
        self._payload = payload
        self._is_gone = False
        channel.join(call, self)

    async def run(self, instance: Instance) -> None:
        """Answer by an instance; in every case the server gets the end of the call."""
        error: InferenceError | None = unexpected()
        try:
            await self._answer(instance)
            error = None
        except InferenceError as found:
            error = found
        except Exception:
            # Around one request: the client gets no details.
            log.exception("request failed unexpectedly")
        finally:
            if not self._is_gone:
                self._end(error)

    def lose(self) -> None:
        self._is_gone = True
        if self.task is not None:
            self.task.cancel()

    async def _answer(self, instance: Instance) -> None:
        request = read_request(self._payload)
        async with aclosing(instance.execute((request,))) as answers:
            async for _, answer in answers:
                if isinstance(answer, InferenceError):
                    raise answer
                if isinstance(answer, InferResponse):
                    self._send_data(write_response(answer))
                    if not self._window.has_room:
                        await self._window.room()

    def _end(self, error: InferenceError | None) -> None:
        if error is None:
            self._channel.send(ClientKind.END, self._call)
        else:
            self._channel.send(ClientKind.REFUSED, self._call, write_error(error))

    def _take(self, frame: Frame) -> None:
        if frame.kind in (ClientKind.GONE, ClientKind.ABORT):
            self.lose()
