"""ModelStreamInfer: one reader task, one answer task per request, one outbox."""

import asyncio
import logging
from collections.abc import AsyncIterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from gateway.conversations.turn import read_turn
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError, exiting, first_error, no_longer_valid
from gateway.frontends.grpc.access import end_answered, end_refused
from gateway.frontends.grpc.outbox import (
    Outbox,
    ResponseSender,
    StreamRequest,
    StrictModeError,
    TaskLimit,
)
from gateway.frontends.grpc.parameters import (
    keyed,
    set_parameter,
    wants_cancel,
    wants_empty_final,
)
from gateway.frontends.grpc.protobuf_wire import Message
from gateway.frontends.grpc.recorded_streams import recorded, resumed, resumes
from gateway.frontends.grpc.refusals import refusal_parameters
from gateway.frontends.grpc.request import RequestDecoder, address
from gateway.frontends.grpc.response import InferResponseEncoder
from gateway.frontends.grpc.rpc import ClientDisconnected, ParsedMessages, RpcCall
from gateway.frontends.grpc.status import RpcError, StatusCode, rpc_error
from gateway.frontends.grpc.stream_order import OrderPosition, StreamOrder
from gateway.frontends.grpc.traces import begin_trace
from gateway.frontends.grpc.unary_infer import wants_limits
from gateway.messages import InferRequest
from gateway.models.model import Model
from gateway.observability.receipt import receipt_of
from gateway.observability.request_context import LoggedRequest, current_request
from gateway.observability.trace import Trace
from gateway.policy.caller import tenant_of
from gateway.protos import grpc_service_pb2 as pb
from gateway.request_name import RequestName
from gateway.resumption.reader import Responses
from gateway.resumption.recording import without_resumable
from gateway.resumption.recordings import Recordings
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.grpc")

STRICT_MODE = ("triton_grpc_error", "true")
"""Metadata of an RPC in strict mode."""

REFUSALS = 64
"""Maximum of unsent refusals; above it reading blocks."""
REMEMBERED = 64
"""Number of ended requests of an RPC whose ids are remembered, for late cancellations."""

SINGLE = "single"
"""Key of the order of requests for models that are not decoupled."""


ENDINGS = (StrictModeError, TimeoutError, RpcError, ClientDisconnected)
"""Expected errors, which end the RPC; any other is logged as unexpected."""


class StreamInferRpcs:
    """The open RPCs of ModelStreamInfer."""

    def __init__(
        self, dataplane: DataPlane, recordings: Recordings, send_timeout_secs: float
    ) -> None:
        self._dataplane = dataplane
        self._recordings = recordings
        self._send_timeout_secs = send_timeout_secs
        self._open: set[StreamInfer] = set()

    async def serve(
        self, requests: AsyncIterable[Message], decoder: RequestDecoder, call: RpcCall
    ) -> None:
        """Serve one RPC. Raises RpcError or ClientDisconnected."""
        outbox = Outbox(call.send, self._send_timeout_secs, call.write)
        rpc = StreamInfer(
            *(self._dataplane, decoder, outbox),
            strict=STRICT_MODE in call.metadata,
            recordings=self._recordings,
        )
        rpc.is_timed = call.wants_timing
        self._open.add(rpc)
        try:
            await rpc.run(requests)
        except StrictModeError as error:
            raise rpc_error(error.error) from None
        except TimeoutError:
            log.warning("client stopped reading", extra={"secs": self._send_timeout_secs})
            raise RpcError(StatusCode.CANCELLED, "the client stopped reading") from None
        finally:
            self._open.discard(rpc)
            admission = self._dataplane.admission
            if admission is not None and wants_limits(admission, call):
                call.set_trailing_metadata(tuple(admission.limit_headers(call.caller).items()))

    def stop_reading(self) -> None:
        """Refuse further requests on every open RPC; the received ones are answered."""
        for rpc in self._open:
            rpc.stop_reading()


class StreamInfer:
    """One RPC. Responses of different requests interleave; those of one request keep their order.

    Requests for models that are not decoupled or not found are answered in the order of arrival
    (protocol: gRPC streaming, ordering), and so are the turns of one conversation. When the RPC
    ends, its streams are cancelled, except that recorded streams can be resumed by another RPC.
    Each request has a receipt if the RPC `is_timed`.
    """

    __slots__ = (
        "_awaits_message",
        "_caller",
        "_dataplane",
        "_decoder",
        "_ended",
        "_is_closed",
        "_is_half_closed",
        "_order",
        "_outbox",
        "_owned",
        "_reader",
        "_recordings",
        "_refusals",
        "_requests",
        "_responses",
        "_rpc",
        "_tenant",
        "is_timed",
    )

    def __init__(
        self,
        dataplane: DataPlane,
        decoder: RequestDecoder,
        outbox: Outbox,
        *,
        strict: bool,
        recordings: Recordings | None = None,
    ) -> None:
        self._dataplane = dataplane
        self._recordings = recordings or Recordings()
        self._decoder = decoder
        self._outbox = outbox
        self._caller, self._tenant = decoder.caller, tenant_of(decoder.caller)
        self._responses = ResponseSender(outbox, strict=strict)
        self._owned: dict[Responses, RequestName] = {}
        self._ended: list[int] = []
        self._refusals = TaskLimit(REFUSALS)
        self._reader: asyncio.Task[None] | None = None
        self._requests: AsyncIterable[Message] | None = None
        self._awaits_message = False
        self._is_closed = not dataplane.taking_requests
        self._is_half_closed = False
        self._order = StreamOrder()
        self._rpc = current_request()
        self.is_timed = False

    async def run(self, requests: AsyncIterable[Message]) -> None:
        """Serve the RPC until the client half-closes and every request is answered.

        Raises StrictModeError in strict mode, TimeoutError when the client stopped reading,
        RpcError for bytes that are not a message, or if the server stopped reading before the
        half-close: a message may have been lost. ClientDisconnected after a disconnect.
        Cancelling the task cancels every request.
        """
        self._requests = requests
        try:
            async with self._outbox, asyncio.TaskGroup() as answers:
                if not self._is_closed:
                    await self._read(requests, answers)
        except BaseExceptionGroup as group:
            # Before Python 3.11.4 an error raised inside `except*` becomes a group again.
            _, unexpected = group.split(ENDINGS)
            raise first_error(unexpected or group) from None
        finally:
            for stream in self._owned:
                stream.cancel()
        if self._is_closed and not self._is_half_closed:
            raise rpc_error(exiting())

    def stop_reading(self) -> None:
        """Refuse further requests; received messages are answered before the RPC ends."""
        self._is_closed = True
        # Deferred until the reader has handled a message that has just arrived.
        asyncio.get_running_loop().call_soon(self._end_reading)

    def _end_reading(self) -> None:
        requests = self._requests
        is_parsing = isinstance(requests, ParsedMessages) and requests.is_parsing
        if self._reader is not None and self._awaits_message and not is_parsing:
            reader, self._reader = self._reader, None
            reader.cancel()

    async def _read(self, requests: AsyncIterable[Message], answers: asyncio.TaskGroup) -> None:
        messages = aiter(requests)
        task = self._reader = asyncio.current_task()
        while True:
            ends = self._is_closed
            if ends:  # a half-close that has arrived is still read
                asyncio.get_running_loop().call_soon(self._end_reading)
            self._awaits_message = True
            try:
                message = await anext(messages)
            except StopAsyncIteration:
                self._is_half_closed = True
                return
            except asyncio.CancelledError:
                if self._reader is not None or task is None or task.uncancel():
                    raise
                return  # `_end_reading` has cancelled this wait only
            finally:
                self._awaits_message = False
            if ends:
                return
            await self._take(message, answers)
            del message  # the next one may be hours away

    async def _take(self, message: Message, answers: asyncio.TaskGroup) -> None:
        address(self._dataplane, message[0], self._caller)
        if wants_cancel(message[0]):
            await self._cancel(message[0], answers)
            return
        found = self._find(message[0])
        position = None if _streams(message[0], found) else self._order.position(SINGLE)
        noted = None if self._rpc is None else self._rpc.part(message[0].id, self._caller)
        try:
            with _about(noted):
                asked = await self._accepted(message, found, position)
        except InferenceError as error:
            if noted is not None:
                end_refused(noted, error)
            if not _names_another(message[0], error):
                self._remember(ended_key(message[0]))
            refusal = _refusal(message[0].id, error)
            await self._refusals.start(answers, partial(self._responses.refuse, refusal, position))
        else:
            with _about(noted):
                task = answers.create_task(self._answer(asked))
            if noted is not None:
                task.add_done_callback(partial(end_answered, noted))
        await self._responses.unsent.wait_for_room()

    async def _accepted(
        self, message: Message, found: Model | InferenceError, position: OrderPosition | None
    ) -> StreamRequest:
        if self._caller is not None and not self._caller.valid:
            raise no_longer_valid()
        if resumes(message[0]):
            return await self._resume(message[0])
        return self._ask(message, found, position)

    async def _cancel(self, message: pb.ModelInferRequest, answers: asyncio.TaskGroup) -> None:
        """Cancel the requests that a message names: those of this RPC, else those of any client.

        A late cancellation of an ended request of this RPC never cancels another client's request.
        """
        name = RequestName(message.model_name, message.model_version, message.id, self._tenant)
        late = ended_key(message) in self._ended
        try:
            name = self._dataplane.numbered(name, self._caller)
            own = [each for each, found in self._owned.items() if name.means(found)]
            running = self._dataplane.running
            await running.cancel_anywhere(name, own, self._caller, only_own=late)
        except InferenceError as error:
            refusal = _refusal(message.id, error)
            await self._refusals.start(answers, partial(self._responses.refuse, refusal, None))

    def _find(self, message: pb.ModelInferRequest) -> Model | InferenceError:
        try:
            return self._dataplane.model(message.model_name, message.model_version, self._caller)
        except InferenceError as error:
            return error.again()

    def _ask(
        self, request: Message, model: Model | InferenceError, position: OrderPosition | None
    ) -> StreamRequest:
        message, raw = request
        if isinstance(model, InferenceError):
            raise model.again()
        decoded = self._decoder.decode(message, raw, model.config)
        infer_request, resumable = without_resumable(decoded)
        receipt, receipts = None, self._dataplane.receipts
        if self.is_timed or infer_request.parameters or receipts.every:
            times = decoded.received_ns, decoded.received_ns
            infer_request = receipts.begin(infer_request, *times, wished=self.is_timed)
            receipt = receipt_of(infer_request)
        is_asked = receipt is not None and receipt.asked
        begun: list[Trace] = []
        submit = partial(self._submit, infer_request, model, begun)
        stream: Responses = (
            recorded(self._recordings, message, infer_request, model, submit)
            if resumable
            else submit()
        )
        model = stream.model
        self._owned[stream] = RequestName(model.name, model.version, message.id, self._tenant)
        return StreamRequest(
            key=ended_key(message),
            stream=stream,
            encoder=InferResponseEncoder(infer_request, model, self._dataplane.shared_memory),
            position=position or self._conversation_position(infer_request, model),
            single=position is not None,
            empty_final=is_asked or wants_empty_final(message),
            trace=begun[0] if begun else None,
            receipt=receipt,
        )

    def _conversation_position(self, request: InferRequest, model: Model) -> OrderPosition | None:
        """The position of a conversation's turn, behind the unsent responses of earlier turns."""
        found = read_turn(request, model.config)
        return None if found is None else self._order.position((model, found.tag.correlation_id))

    def _submit(self, request: InferRequest, model: Model, begun: list[Trace]) -> ResponseStream:
        tracer = self._dataplane.tracer
        trace = None
        if tracer.on:
            trace = begin_trace(tracer, request, self._decoder.metadata, request.received_ns)
        if trace is not None:
            begun.append(trace)
        if model.chooser is not None:
            request = keyed(request, model.chooser, self._decoder)
        return self._dataplane.infer(request, model, trace)

    async def _resume(self, message: pb.ModelInferRequest) -> StreamRequest:
        reader = await resumed(self._recordings, message, self._caller)
        model = reader.recorded.model
        self._owned[reader] = RequestName(model.name, model.version, message.id, self._tenant)
        # Responses have the id of the resuming message.
        request = replace(reader.recorded.request, id=message.id)
        return StreamRequest(
            key=ended_key(message),
            stream=reader,
            encoder=InferResponseEncoder(request, model, self._dataplane.shared_memory),
            position=None,
            single=False,
            empty_final=wants_empty_final(message),
        )

    async def _answer(self, asked: StreamRequest) -> None:
        with asked.position or nullcontext():
            error = await self._responses.answer(asked)
            self._owned.pop(asked.stream, None)
            if error is None or error.code is not Code.ALREADY_EXISTS:
                self._remember(asked.key)

    def _remember(self, key: int | None) -> None:
        """Remember an ended request."""
        if key is not None:
            self._ended.append(key)
            del self._ended[:-REMEMBERED]


def _about(noted: LoggedRequest | None) -> AbstractContextManager[None]:
    """A block that is about a request, if the server notes requests."""
    return nullcontext() if noted is None else noted.current()


def ended_key(message: pb.ModelInferRequest) -> int | None:
    """The key of an ended request: a hash, because ids may be long; None without an id."""
    return hash((message.model_name, message.id)) if message.id else None


def _streams(message: pb.ModelInferRequest, model: Model | InferenceError) -> bool:
    """Whether responses to a message are unordered relative to other requests."""
    return resumes(message) or (isinstance(model, Model) and model.decoupled)


def _names_another(message: pb.ModelInferRequest, error: InferenceError) -> bool:
    """Whether the id of a refused message may belong to a request of another RPC."""
    return resumes(message) or error.code is Code.ALREADY_EXISTS


def _refusal(request_id: str, error: InferenceError) -> bytes:
    """The response to a request refused before execution: its id and the error."""
    response = pb.ModelInferResponse(id=request_id)
    for name, value in refusal_parameters(error).items():
        set_parameter(response.parameters[name], value)
    return pb.ModelStreamInferResponse(
        error_message=error.message, infer_response=response
    ).SerializeToString()
