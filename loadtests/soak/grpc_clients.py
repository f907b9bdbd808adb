"""Actions of gRPC clients, well-behaved or not."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from loadtests.grpc_soak import ABUSES, INFER, UNLIMITED
from loadtests.soak import requests
from loadtests.soak.keys import Keys
from loadtests.soak.requests import Question, Refused, Tally, Wrong
from loadtests.support.stream_client import METHOD

LEAVE_SECS = 0.004
DEADLINE_SECS = 0.01
PAUSE_SECS = 0.1
CANCEL = "cancel"
FINAL = "triton_final_response"
EMPTY = "triton_enable_empty_final_response"
ENDED_ALREADY = "runs no request with the id"
"""The answer to a cancel after the end of its request."""

UNAUTHENTICATED = ("UNAUTHENTICATED", "INVALID_ARGUMENT")
CLIENTS_CODES = frozenset({"CANCELLED", "DEADLINE_EXCEEDED"})
"""Codes of RPCs that the client itself ends."""


@dataclass(slots=True)
class Awaited:
    """One request of a stream, and the state of its responses."""

    question: Question
    stopped: bool = False
    responses: int = 0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class GrpcClients:
    """Acts of gRPC, with a channel; an act returns once its RPC has ended.

    Their requests have the key of the tenant of the `client`.
    """

    channel: Any
    port: int
    tally: Tally
    random: random.Random
    questions: Callable[[], Question] = field(repr=False)
    keys: Keys
    client: int

    async def whole(self, question: Question) -> None:
        """ModelInfer."""
        if question.model.responses:
            return await self.stream(question)
        return await self._unary(question)

    async def deadline(self, question: Question) -> None:
        """ModelInfer with a deadline of at most ten milliseconds."""
        if question.model.responses:
            return await self.leave_stream(question)
        return await self._unary(question, self.random.random() * DEADLINE_SECS)

    async def leave(self, question: Question) -> None:
        """Cancel a ModelInfer within four milliseconds."""
        call = self._infer(question)
        await self._soon()
        call.cancel()
        await asyncio.wait([asyncio.ensure_future(call.code())])

    async def stream(self, question: Question) -> None:
        """Several requests on one ModelStreamInfer, some cancelled by their id, to its end."""
        awaited = self._awaited(question)
        call = self._open()
        reader = asyncio.create_task(self._read(call, awaited))
        try:
            for each in awaited.values():
                await self._write(call, each)
            await call.done_writing()
            await reader
        except asyncio.InvalidStateError as error:  # the RPC has ended
            raise Wrong(f"the stream ended: {await call.code()} {error}") from None
        except asyncio.CancelledError:
            left = (each.question.model.name for each in awaited.values() if not each.ended)
            self.tally.hung += (f"{name} (one of a gRPC stream)" for name in left)
            raise
        finally:
            reader.cancel()
            call.cancel()

    async def leave_stream(self, question: Question) -> None:
        """Cancel a ModelStreamInfer at some moment."""
        call = self._open()
        for each in self._awaited(question).values():
            await self._write(call, each)
        if self.random.random() < 0.5:
            await call.read()
        else:
            await self._soon()
        call.cancel()
        await asyncio.wait([asyncio.ensure_future(call.code())])

    async def slow_stream(self, question: Question) -> None:
        """Half-close a ModelStreamInfer, read it with pauses, and sometimes cancel it."""
        call = self._open()
        for each in self._awaited(question).values():
            await self._write(call, each)
        await call.done_writing()
        for _ in range(self.random.randrange(5)):
            await asyncio.sleep(self.random.random() * PAUSE_SECS)
            if await call.read() is grpc.aio.EOF:
                break
        call.cancel()

    async def close_channel(self, question: Question) -> None:
        """Close the connection under RPCs."""
        async with connect(self.port) as channel:
            own = (self.port, self.tally, self.random, self.questions, self.keys, self.client)
            mine = GrpcClients(channel, *own)
            calls = [mine._infer(question), mine._open()]
            await mine._write(calls[1], Awaited(question))
            await self._soon()
        for call in calls:
            call.cancel()

    async def wrong_key(self, question: Question) -> None:
        """ModelInfer with a credential that is none."""
        call = self.channel.unary_unary(INFER)
        wrong = self.keys.wrong(self.random).replace("\x7f", "~")  # gRPC's client refuses others
        try:
            await call(b"", metadata=[("authorization", wrong)])
        except grpc.aio.AioRpcError as error:
            if error.code().name in UNAUTHENTICATED:
                return
            raise
        self.tally.surprise("a wrong key was accepted by ModelInfer")

    async def garbage(self, _: Question) -> None:
        """Frames that no client may send; the server closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(self.random.choice(ABUSES)())
            writer.write_eof()
            while await reader.read(2**16):
                """Frames before the connection is closed."""
        except OSError:  # it has closed the connection before it read all
            return
        finally:
            writer.close()

    def _infer(self, question: Question, within: float | None = None) -> Any:
        self.tally.ask(question)
        call = self.channel.unary_unary(
            INFER,
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        return call(requests.message(question), timeout=within, metadata=self._metadata)

    async def _unary(self, question: Question, within: float | None = None) -> None:
        try:
            answer = await self._infer(question, within)
            requests.check_message(question, 0, answer)
        except grpc.aio.AioRpcError as error:
            if within is None or error.code().name not in CLIENTS_CODES:
                refusal = Refused(error.code().name, str(error.details()))
                self.tally.refuse(question, refusal, timed=within is not None)
        except Wrong as error:
            self.tally.surprise(f"{question.model.name}, ModelInfer: {error}")
        else:
            self.tally.answer(question)

    def _open(self) -> Any:
        return self.channel.stream_stream(
            METHOD,
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )(metadata=self._metadata)

    @property
    def _metadata(self) -> Sequence[tuple[str, str]]:
        return [("authorization", self.keys.of(self.client))]

    def _awaited(self, question: Question) -> dict[str, Awaited]:
        more = (self.questions() for _ in range(self.random.randrange(6)))
        return {each.id: Awaited(each) for each in (question, *more)}

    async def _write(self, call: Any, awaited: Awaited) -> None:
        question = awaited.question
        self.tally.ask(question)
        await call.write(requests.message(question, **{EMPTY: True}))
        if self.random.random() < 0.15:
            await self._soon()
            awaited.stopped = True
            model = question.model.name
            stop = pb.ModelInferRequest(model_name=model, id=question.id)
            stop.parameters[CANCEL].bool_param = True
            await call.write(stop)

    async def _read(self, call: Any, awaited: Mapping[str, Awaited]) -> None:
        while (answer := await call.read()) is not grpc.aio.EOF:
            found = awaited.get(answer.infer_response.id)
            if found is None:
                self.tally.surprise(f"a stream answered an id that was not asked: {answer}")
            else:
                self._take(found, answer)
        if left := [each.question.model.name for each in awaited.values() if not each.ended]:
            code, text = await call.code(), await call.details()
            raise Wrong(f"a stream ended with {code.name} {text!r} before answers of {left}")

    def _take(self, awaited: Awaited, answer: Any) -> None:
        question = awaited.question
        parameters = answer.infer_response.parameters
        if awaited.stopped and ENDED_ALREADY in answer.error_message:
            return
        if answer.error_message:
            if not (awaited.stopped and awaited.ended):
                refusal = Refused("stream", answer.error_message)
                self.tally.refuse(question, refusal, stopped=awaited.stopped)
            awaited.ended = True
            return
        if answer.infer_response.raw_output_contents:
            try:
                requests.check_message(question, awaited.responses, answer.infer_response)
            except Wrong as error:
                self.tally.surprise(f"{question.model.name}, ModelStreamInfer: {error}")
            awaited.responses += 1
        if parameters[FINAL].bool_param:
            awaited.ended = True
            self._count(awaited, cancelled=parameters["cancelled"].bool_param)

    def _count(self, awaited: Awaited, *, cancelled: bool) -> None:
        expected = max(1, awaited.question.model.responses)
        if awaited.question.model.name == "openai":
            expected = awaited.responses
        if cancelled:
            return
        if awaited.responses == expected:
            self.tally.answer(awaited.question)
        else:
            name = awaited.question.model.name
            self.tally.surprise(f"{name}: {awaited.responses} responses, expected {expected}")

    async def _soon(self) -> None:
        await asyncio.sleep(self.random.random() * LEAVE_SECS)


def connect(port: int) -> Any:
    """A channel with a connection of its own."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED)


Act = Callable[[GrpcClients, Question], Awaitable[None]]
ACTS: Mapping[str, tuple[float, Act]] = {
    "gRPC whole": (4, GrpcClients.whole),
    "gRPC leave": (5, GrpcClients.leave),
    "gRPC deadline": (2, GrpcClients.deadline),
    "gRPC stream": (3, GrpcClients.stream),
    "gRPC leave stream": (4, GrpcClients.leave_stream),
    "gRPC slow stream": (1, GrpcClients.slow_stream),
    "gRPC close channel": (0.5, GrpcClients.close_channel),
    "gRPC garbage": (0.5, GrpcClients.garbage),
    "gRPC wrong key": (1, GrpcClients.wrong_key),
}
"""Each act with its weight."""

ENDED: tuple[type[Exception], ...] = (
    grpc.aio.AioRpcError,
    ConnectionError,
    asyncio.InvalidStateError,
)
"""The errors of an act whose RPC the server ended."""
