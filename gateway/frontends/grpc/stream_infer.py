"""ModelStreamInfer: one reader task, one answer task per request, one outbox."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

from gateway.conversations.turn import read_turn
from gateway.dataplane import DataPlane, RequestName
from gateway.errors import UNEXPECTED, Code, InferenceError, first_error
from gateway.frontends.grpc.outbox import (
    OrderPosition,
    Outbox,
    StreamOrder,
    TaskLimit,
    UnsentResponses,
)
from gateway.frontends.grpc.parameters import wants_cancel, wants_empty_final
from gateway.frontends.grpc.protobuf_wire import Message
from gateway.frontends.grpc.request import RequestDecoder, begin_trace
from gateway.frontends.grpc.response import InferResponseEncoder
from gateway.frontends.grpc.resumption import marked, recorded, resumed, resumes
from gateway.frontends.grpc.rpc import ClientDisconnected, ParsedMessages, RpcError
from gateway.messages import InferRequest, InferResponse
from gateway.models.model import Model
from gateway.observability.trace import Trace
from gateway.protos import grpc_service_pb2 as pb
from gateway.resumption.reader import Responses, recorded_stream
from gateway.resumption.recording import without_resumable
from gateway.resumption.recordings import Recordings
from gateway.stream import INTERRUPTED, Interrupted, ResponseStream, has_data

log = logging.getLogger("sluice.grpc")

REFUSALS = 64
"""Maximum of unsent refusals; above it reading blocks."""

SINGLE = "single"
"""Key of the order of requests for models that are not decoupled."""

REMEMBERED = 64
"""Number of ended requests of an RPC whose ids are remembered, for late cancellations."""


class StrictModeError(Exception):
    """An error in strict mode; it ends the RPC with its status."""

    def __init__(self, error: InferenceError) -> None:
        super().__init__(error.message)
        self.error = error


ENDINGS = (StrictModeError, TimeoutError, RpcError, ClientDisconnected)
"""Expected errors, which end the RPC; any other is logged as unexpected."""


@dataclass(slots=True, eq=False)
class StreamRequest:
    """One request of the RPC: its response stream, its encoder and its position in the order.

    A `single` request has exactly one response. Other requests have a position only as turns of a
    conversation.
    """

    message: pb.ModelInferRequest
    stream: Responses
    encoder: InferResponseEncoder
    position: OrderPosition | None
    single: bool
    empty_final: bool
    trace: Trace | None = None


class StreamInfer:
    """One RPC. Responses of different requests interleave; those of one request keep their order.

    Requests for models that are not decoupled or not found are answered in the order of arrival
    (protocol: gRPC streaming, ordering), and so are the turns of one conversation. When the RPC
    ends, its streams are cancelled, except that recorded streams can be resumed by another RPC.
    """

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
        self._strict = strict
        self._owned: dict[Responses, RequestName] = {}
        self._ended: deque[int] = deque(maxlen=REMEMBERED)
        self._refusals = TaskLimit(REFUSALS)
        self._unsent = UnsentResponses()
        self._reader: asyncio.Task[None] | None = None
        self._requests: AsyncIterable[Message] | None = None
        self._awaits_message = False
        self._is_closed = False
        self._order = StreamOrder()

    async def run(self, requests: AsyncIterable[Message]) -> None:
        """Serve the RPC until the client half-closes and every request is answered.

        Raises StrictModeError in strict mode, TimeoutError when the client stopped reading,
        RpcError for bytes that are not a message, ClientDisconnected after a disconnect.
        Cancelling the task cancels every request.
        """
        self._requests = requests
        try:
            async with self._outbox.watched(), asyncio.TaskGroup() as answers:
                if self._dataplane.taking_requests:
                    self._reader = answers.create_task(self._read(requests, answers))
        except BaseExceptionGroup as group:
            # Before Python 3.11.4 an error raised inside `except*` becomes a group again.
            _, unexpected = group.split(ENDINGS)
            raise first_error(unexpected or group) from None
        finally:
            for stream in self._owned:
                stream.cancel()

    def stop_reading(self) -> None:
        """Refuse further requests, as after a half-close; received messages are answered."""
        self._is_closed = True
        # Deferred until the reader has handled a message that has just arrived.
        asyncio.get_running_loop().call_soon(self._end_reading)

    def _end_reading(self) -> None:
        requests = self._requests
        is_parsing = isinstance(requests, ParsedMessages) and requests.is_parsing
        if self._reader is not None and self._awaits_message and not is_parsing:
            self._reader.cancel()

    async def _read(self, requests: AsyncIterable[Message], answers: asyncio.TaskGroup) -> None:
        messages = aiter(requests)
        while not self._is_closed:
            self._awaits_message = True
            try:
                message = await anext(messages)
            except StopAsyncIteration:
                return
            finally:
                self._awaits_message = False
            await self._take(message, answers)

    async def _take(self, message: Message, answers: asyncio.TaskGroup) -> None:
        if wants_cancel(message[0]):
            await self._cancel(message[0], answers)
            return
        found = self._find(message[0])
        position = None if _streams(message[0], found) else self._order.position(SINGLE)
        try:
            asked = self._ask(message, found, position)
        except InferenceError as error:
            if not _names_another(message[0], error):
                self._remember(message[0])
            refusal = _refusal(message[0].id, error)
            await self._refusals.start(answers, partial(self._refuse, refusal, position))
        else:
            answers.create_task(self._answer(asked))
        await self._unsent.wait_for_room()

    async def _cancel(self, message: pb.ModelInferRequest, answers: asyncio.TaskGroup) -> None:
        """Cancel the requests that a message names: those of this RPC, else those of any client.

        A late cancellation of an ended request of this RPC never cancels another client's request.
        """
        name = RequestName(message.model_name, message.model_version, message.id)
        own = [recorded_stream(each) for each, found in self._owned.items() if name.means(found)]
        late = hash((name.model, name.id)) in self._ended
        try:
            self._dataplane.cancel(name, own, only_own=late)
        except InferenceError as error:
            refusal = _refusal(message.id, error)
            await self._refusals.start(answers, partial(self._refuse, refusal, None))

    def _find(self, message: pb.ModelInferRequest) -> Model | InferenceError:
        try:
            return self._dataplane.model(message.model_name, message.model_version)
        except InferenceError as error:
            return error

    def _ask(
        self, request: Message, model: Model | InferenceError, position: OrderPosition | None
    ) -> StreamRequest:
        message, raw = request
        if resumes(message):
            return self._resume(message)
        if isinstance(model, InferenceError):
            raise model
        decoded = self._decoder.decode(message, raw, model.config)
        infer_request, resumable = without_resumable(decoded)
        begun: list[Trace] = []
        submit = partial(self._submit, infer_request, model, begun)
        stream: Responses = (
            recorded(self._recordings, message, infer_request, model, submit)
            if resumable
            else submit()
        )
        self._owned[stream] = RequestName(model.name, model.version, message.id)
        return StreamRequest(
            message=message,
            stream=stream,
            encoder=InferResponseEncoder(infer_request, model, self._dataplane.shared_memory),
            position=position or self._conversation_position(infer_request, model),
            single=position is not None,
            empty_final=wants_empty_final(message),
            trace=begun[0] if begun else None,
        )

    def _conversation_position(self, request: InferRequest, model: Model) -> OrderPosition | None:
        """The position of a conversation's turn, behind the unsent responses of earlier turns."""
        found = read_turn(request, model.config)
        return None if found is None else self._order.position((model, found.tag.correlation_id))

    def _submit(
        self, infer_request: InferRequest, model: Model, begun: list[Trace]
    ) -> ResponseStream:
        trace = begin_trace(self._dataplane.tracer, infer_request)
        if trace is not None:
            begun.append(trace)
        return self._dataplane.infer(infer_request, model, trace)

    def _resume(self, message: pb.ModelInferRequest) -> StreamRequest:
        reader = resumed(self._recordings, message)
        model = reader.recorded.model
        self._owned[reader] = RequestName(model.name, model.version, message.id)
        # Responses have the id of the resuming message.
        request = replace(reader.recorded.request, id=message.id)
        return StreamRequest(
            message=message,
            stream=reader,
            encoder=InferResponseEncoder(request, model, self._dataplane.shared_memory),
            position=None,
            single=False,
            empty_final=wants_empty_final(message),
        )

    async def _refuse(self, refusal: bytes, position: OrderPosition | None) -> None:
        with position or nullcontext():
            if position is not None:
                await position.reached()
            await self._outbox.put([refusal])

    async def _answer(self, asked: StreamRequest) -> None:
        with asked.position or nullcontext():
            await self._answer_in_turn(asked)
            self._owned.pop(asked.stream, None)
            self._remember(asked.message)

    async def _answer_in_turn(self, asked: StreamRequest) -> None:
        with asked.stream:
            try:
                if asked.single:
                    await self._forward_single(asked)
                else:
                    await self._forward(asked)
            except InferenceError as error:
                await self._report(asked, error)
            except (StrictModeError, ClientDisconnected):
                raise
            except Exception:
                # Around one request in a frontend: the others on the RPC continue.
                log.exception("request failed unexpectedly")
                await self._report(asked, UNEXPECTED)
            finally:
                if asked.trace is not None:
                    asked.trace.sent()

    def _remember(self, message: pb.ModelInferRequest) -> None:
        """Remember the id of an ended request, by its hash because ids may be long."""
        if message.id:
            self._ended.append(hash((message.model_name, message.id)))

    async def _forward(self, asked: StreamRequest) -> None:
        if asked.position is not None:
            await asked.position.reached()
        complete = False
        while batch := await asked.stream.batch():
            complete = batch[-1].final and _is_sent(asked, batch[-1])
            shown, error = marked(asked.stream, batch), None
            if self._strict:
                shown, error = _until_error(shown)
            messages = [
                _encode(asked, response)
                for each, response in zip(batch, shown, strict=False)
                if _is_sent(asked, each)
            ]
            if messages and not self._outbox.is_busy:
                await self._send(asked, messages)
            elif messages:
                with self._unsent.counted(messages):
                    await self._send(asked, messages)
            if error is not None:
                raise StrictModeError(error)
        if not complete and asked.empty_final:
            await self._send(asked, [_encode(asked, InferResponse(final=True))])

    async def _forward_single(self, asked: StreamRequest) -> None:
        error: InferenceError | None = None
        messages: list[bytes] = []
        try:
            messages = [_encode(asked, replace(await asked.stream.only(), final=True))]
        except Interrupted as found:
            messages = [_encode(asked, each) for each in (*found.answers, INTERRUPTED)]
        except InferenceError as found:
            error = found
        with self._unsent.counted(messages):
            if asked.position is not None:
                await asked.position.reached()
            if error is not None:
                raise error
            await self._send(asked, messages)

    async def _report(self, asked: StreamRequest, error: InferenceError) -> None:
        if self._strict:
            raise StrictModeError(error)
        await self._send(asked, [_encode(asked, InferResponse(error=error, final=True))])

    async def _send(self, asked: StreamRequest, messages: Sequence[bytes]) -> None:
        """Send messages, and record the times in the trace of the request."""
        if asked.trace is not None:
            asked.trace.stamp("GRPC_SEND_START")
        await self._outbox.put(messages)
        if asked.trace is not None:
            asked.trace.stamp("GRPC_SEND_END")


def _streams(message: pb.ModelInferRequest, model: Model | InferenceError) -> bool:
    """Whether responses to a message are unordered relative to other requests."""
    return resumes(message) or (isinstance(model, Model) and model.decoupled)


def _names_another(message: pb.ModelInferRequest, error: InferenceError) -> bool:
    """Whether the id of a refused message may belong to a request of another RPC."""
    return resumes(message) or error.code is Code.ALREADY_EXISTS


def _encode(asked: StreamRequest, response: InferResponse) -> bytes:
    return asked.encoder.encode_streamed(response, asked.message.model_version)


def _until_error(
    shown: Sequence[InferResponse],
) -> tuple[Sequence[InferResponse], InferenceError | None]:
    """The responses before the first with an error, and that error."""
    for place, response in enumerate(shown):
        if response.error is not None:
            return shown[:place], response.error
    return shown, None


def _is_sent(asked: StreamRequest, response: InferResponse) -> bool:
    return asked.empty_final or has_data(response)


def _refusal(request_id: str, error: InferenceError) -> bytes:
    """The response to a request refused before execution: its id and the error."""
    return pb.ModelStreamInferResponse(
        error_message=error.message, infer_response=pb.ModelInferResponse(id=request_id)
    ).SerializeToString()
