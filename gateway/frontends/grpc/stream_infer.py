"""ModelStreamInfer: one reader, one answer task per request, one writer."""

import asyncio
import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from google.protobuf.message import DecodeError

from gateway.dataplane import DataPlane
from gateway.errors import UNEXPECTED, InferenceError
from gateway.frontends.grpc import codec
from gateway.messages import InferResponse
from gateway.protos import grpc_service_pb2 as pb
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.grpc")

OUTGOING_BATCHES = 16
"""Batches of answers that wait for a slow client before it holds back the models."""

REFUSALS = 64
"""Refusals that wait for a slow client, or for their turn, before no more requests are read."""


Write = Callable[[pb.ModelStreamInferResponse], Awaitable[None]]


class StrictError(Exception):
    """A model's error in strict mode: it ends the RPC with its status."""

    def __init__(self, error: InferenceError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One place in the order of answers: after the place before it, until it is `over`."""

    before: asyncio.Event | None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def come(self) -> None:
        """Wait until every place before this one is over."""
        if self.before is not None:
            await self.before.wait()


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One request of the stream: where its answers come from and how they are labelled.

    A request of a decoupled model has no turn.
    """

    message: pb.ModelInferRequest
    stream: ResponseStream
    version: str
    turn: Turn | None
    empty_final: bool


class StreamInfer:
    """One RPC. Its answers interleave between requests and keep their order within one.

    Requests of models that are not decoupled, or not known, are answered in the order they came
    (protocol: gRPC streaming, ordering). When the RPC ends, however it ends, every stream it owns
    is left.
    """

    def __init__(
        self, dataplane: DataPlane, write: Write, send_timeout_secs: float, *, strict: bool
    ) -> None:
        self._dataplane = dataplane
        self._write = write
        self._send_timeout_secs = send_timeout_secs
        self._strict = strict
        self._owned: set[ResponseStream] = set()
        self._outgoing: asyncio.Queue[Sequence[pb.ModelStreamInferResponse] | None] = asyncio.Queue(
            OUTGOING_BATCHES
        )
        self._refusals = asyncio.Semaphore(REFUSALS)
        self._reader: asyncio.Task[None] | None = None
        self._last_turn: asyncio.Event | None = None

    async def run(self, requests: AsyncIterable[pb.ModelInferRequest]) -> None:
        """Serve the RPC until the client half-closes and every request is answered.

        Raises StrictError in strict mode, TimeoutError when the client stopped reading, DecodeError
        when it sent what is no message; cancellation cancels every request of the stream.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._answer_all(requests))
                await self._send_answers()
        except* (StrictError, TimeoutError, DecodeError) as group:
            raise _first(group) from None
        finally:
            for stream in self._owned:
                stream.cancel()

    def stop_reading(self) -> None:
        """Take no more requests, as if the client had half-closed."""
        if self._reader is not None:
            self._reader.cancel()

    async def _answer_all(self, requests: AsyncIterable[pb.ModelInferRequest]) -> None:
        async with asyncio.TaskGroup() as answers:
            if not self._dataplane.exiting:
                self._reader = answers.create_task(self._read(requests, answers))
        await self._outgoing.put(None)

    async def _read(
        self, requests: AsyncIterable[pb.ModelInferRequest], answers: asyncio.TaskGroup
    ) -> None:
        async for message in requests:
            turn = None if self._is_decoupled(message) else self._next_turn()
            try:
                asked = self._ask(message, turn)
            except InferenceError as error:
                await self._refusals.acquire()
                answers.create_task(self._refuse(_refusal(message.id, error), turn))
            else:
                answers.create_task(self._answer(asked))

    def _is_decoupled(self, message: pb.ModelInferRequest) -> bool:
        try:
            model = self._dataplane.model(message.model_name, message.model_version)
        except InferenceError:
            return False
        return model.config.decoupled

    def _next_turn(self) -> Turn:
        turn = Turn(before=self._last_turn)
        self._last_turn = turn.over
        return turn

    def _ask(self, message: pb.ModelInferRequest, turn: Turn | None) -> Asked:
        model = self._dataplane.model(message.model_name, message.model_version)
        stream = self._dataplane.infer(codec.decode_request(message))
        self._owned.add(stream)
        return Asked(
            message=message,
            stream=stream,
            version=model.version,
            turn=turn,
            empty_final=codec.wants_empty_final(message),
        )

    async def _refuse(self, refusal: pb.ModelStreamInferResponse, turn: Turn | None) -> None:
        if turn is not None:
            await turn.come()
        await self._outgoing.put([refusal])
        self._refusals.release()
        if turn is not None:
            turn.over.set()

    async def _answer(self, asked: Asked) -> None:
        with asked.stream:
            try:
                if asked.turn is None:
                    await self._forward(asked)
                else:
                    await self._forward_in_turn(asked, asked.turn)
            except InferenceError as error:
                await self._report(asked, error)
            except StrictError:
                raise
            except Exception:
                # Around one request in a frontend: the others on the stream go on.
                log.exception("request failed unexpectedly")
                await self._report(asked, UNEXPECTED)
        self._owned.discard(asked.stream)
        if asked.turn is not None:
            asked.turn.over.set()

    async def _forward(self, asked: Asked) -> None:
        complete = False
        while batch := await asked.stream.batch():
            complete = batch[-1].final and (bool(batch[-1].outputs) or asked.empty_final)
            messages = [_encode(asked, each) for each in batch if _is_sent(asked, each)]
            if messages:
                await self._outgoing.put(messages)
        if not complete and asked.empty_final:
            await self._outgoing.put([_encode(asked, InferResponse(final=True))])

    async def _forward_in_turn(self, asked: Asked, turn: Turn) -> None:
        error: InferenceError | None = None
        try:
            message = _encode(asked, replace(await asked.stream.only(), final=True))
        except InferenceError as found:
            error = found
        await turn.come()
        if error is not None:
            raise error
        await self._outgoing.put([message])

    async def _report(self, asked: Asked, error: InferenceError) -> None:
        if self._strict:
            raise StrictError(error)
        message = pb.ModelStreamInferResponse(error_message=error.message)
        message.infer_response.CopyFrom(
            pb.ModelInferResponse(
                id=asked.message.id,
                model_name=asked.message.model_name,
                model_version=asked.message.model_version,
            )
        )
        message.infer_response.parameters[codec.FINAL].bool_param = True
        await self._outgoing.put([message])

    async def _send_answers(self) -> None:
        while (messages := await self._outgoing.get()) is not None:
            async with asyncio.timeout(self._send_timeout_secs):
                for message in messages:
                    await self._write(message)


def _encode(asked: Asked, response: InferResponse) -> pb.ModelStreamInferResponse:
    # An empty final response names the version that was asked for (protocol: gRPC streaming).
    version = asked.version if response.outputs else asked.message.model_version
    encoded = codec.encode_response(response, asked.message.model_name, version, asked.message.id)
    encoded.parameters[codec.FINAL].bool_param = response.final
    return pb.ModelStreamInferResponse(infer_response=encoded)


def _is_sent(asked: Asked, response: InferResponse) -> bool:
    return bool(response.outputs) or not response.final or asked.empty_final


def _refusal(request_id: str, error: InferenceError) -> pb.ModelStreamInferResponse:
    """What was refused before execution carries its id and nothing else."""
    return pb.ModelStreamInferResponse(
        error_message=error.message, infer_response=pb.ModelInferResponse(id=request_id)
    )


def _first(group: BaseExceptionGroup[Exception]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
