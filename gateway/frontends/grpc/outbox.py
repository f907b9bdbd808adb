"""Responses of one ModelStreamInfer: limits of unsent ones, sending."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from gateway.errors import InferenceError, RefusedError, unexpected
from gateway.frontends.grpc.refusals import refusal_parameters
from gateway.frontends.grpc.response import InferResponseEncoder
from gateway.frontends.grpc.rpc import ClientDisconnected
from gateway.frontends.grpc.stream_order import OrderPosition
from gateway.messages import InferResponse, Parameter
from gateway.observability.receipt import Receipt, with_timing
from gateway.observability.trace import Trace
from gateway.resumption.reader import EventId, RecordingReader, Responses
from gateway.stream import INTERRUPTED, Interrupted, ResponseStream, has_data

log = logging.getLogger("sluice.grpc")

Send = Callable[[Sequence[bytes]], Awaitable[None]]
Write = Callable[[Sequence[bytes]], bool]
"""See `RpcCall.write`."""

MAX_ANSWERS = 1024
MAX_BYTES = 64 * 1024 * 1024
"""Limits of unsent responses; at either one, reading requests blocks."""

EVENT = "sluice_event"
"""Response parameter: number of the response in its stream, from 1."""
STREAM = "sluice_stream"
"""Response parameter of the first response: token of the stream."""


class Outbox:
    """Sends one batch of messages at a time, in the order of the calls of `put`.

    One timer per RPC, instead of one per batch, enforces the send timeout: inside `async with`,
    sending a batch for longer raises TimeoutError.
    """

    __slots__ = (
        "_is_late",
        "_send",
        "_sending",
        "_started",
        "_timeout",
        "_timeout_secs",
        "_timer",
        "_write",
    )

    def __init__(self, send: Send, timeout_secs: float, write: Write | None = None) -> None:
        self._send, self._write = send, write
        self._timeout_secs = timeout_secs
        self._sending = asyncio.Lock()
        self._started = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timeout: asyncio.Timeout
        self._is_late = False

    async def __aenter__(self) -> None:
        self._timeout = await asyncio.timeout(None).__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        finally:
            self._is_late = True
            if self._timer is not None:
                self._timer.cancel()

    @property
    def is_busy(self) -> bool:
        """Whether a batch is being sent."""
        return self._sending.locked()

    async def put(self, messages: Sequence[bytes]) -> None:
        """Send messages after all earlier ones; raises the errors of sending."""
        async with self._sending:
            self._started = asyncio.get_running_loop().time()
            if self._timer is None:
                self._check_in(self._timeout_secs)
            try:
                await self._send(messages)
            finally:
                self._started = 0.0

    def write(self, messages: Sequence[bytes]) -> bool:
        """Send messages at once; False, and none is sent, if `put` has to."""
        return self._write is not None and not self.is_busy and self._write(messages)

    def _check_in(self, after_secs: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_secs, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._started or self._is_late:
            return
        left = self._started + self._timeout_secs - asyncio.get_running_loop().time()
        if left > 0:
            self._check_in(left)
        else:
            self._is_late = True
            self._timeout.reschedule(0)


class PromptTexts:
    """Sends the texts of a stream in the code that puts them, so that no task wakes for a token."""

    __slots__ = ("_encode", "_outbox", "_stream")

    def __init__(
        self, stream: ResponseStream, encoder: InferResponseEncoder, outbox: Outbox
    ) -> None:
        self._stream = stream
        self._encode = encoder.encode_texts
        self._outbox = outbox

    async def batch(self) -> Sequence[InferResponse]:
        """The next responses that are not sent so; empty once the stream has ended."""
        self._stream.write_texts = self._write
        try:
            return await self._stream.batch()
        finally:
            self._stream.write_texts = None

    def _write(self, name: str, texts: Sequence[bytes]) -> bool:
        messages = self._encode(name, texts)
        return messages is not None and self._outbox.write(messages)


class UnsentResponses:
    """Number and bytes of the finished responses of one RPC that are not sent.

    One task waits for room.
    """

    __slots__ = ("_answers", "_bytes", "_waiter")

    def __init__(self) -> None:
        self._answers = 0
        self._bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        """Whether a limit is reached."""
        return self._answers >= MAX_ANSWERS or self._bytes >= MAX_BYTES

    @contextmanager
    def counted(self, messages: Sequence[bytes]) -> Iterator[None]:
        """Count messages as unsent inside `with`; an empty sequence (an error) counts as one."""
        count, size = max(len(messages), 1), sum(map(len, messages))
        self._answers += count
        self._bytes += size
        try:
            yield
        finally:
            self._answers -= count
            self._bytes -= size
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    async def wait_for_room(self) -> None:
        """Wait until no limit is reached."""
        while self.full:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter


class TaskLimit:
    """Limit of the running tasks of one kind."""

    __slots__ = ("_free",)

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    async def start(
        self, tasks: asyncio.TaskGroup, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Wait until the limit allows one more task, and start it."""
        await self._free.acquire()
        try:
            task = tasks.create_task(work())
        except BaseException:
            self._free.release()
            raise
        task.add_done_callback(self._release)

    def _release(self, task: "asyncio.Task[None]") -> None:
        self._free.release()


class StrictModeError(Exception):
    """An error in strict mode; it ends the RPC with its status."""

    def __init__(self, error: InferenceError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(slots=True, eq=False)
class StreamRequest:
    """One request of the RPC: its response stream, its encoder and its position in the order.

    A `single` request has exactly one response. Other requests have a position only as turns of a
    conversation. `key` is that of `ended_key`.
    """

    key: int | None
    stream: Responses
    encoder: InferResponseEncoder
    position: OrderPosition | None
    single: bool
    empty_final: bool
    trace: Trace | None = None
    receipt: Receipt | None = None


class ResponseSender:
    """Sends the responses to the requests of one RPC.

    In strict mode an error raises StrictModeError, else it is sent. A refusal is always sent.
    """

    __slots__ = ("_outbox", "_strict", "unsent")

    def __init__(self, outbox: Outbox, *, strict: bool) -> None:
        self.unsent = UnsentResponses()
        self._outbox = outbox
        self._strict = strict

    async def answer(self, asked: StreamRequest) -> InferenceError | None:
        """Send the responses to a request, and cancel it when this ends; its error, if any."""
        with asked.stream:
            try:
                if asked.single:
                    await self._forward_single(asked)
                else:
                    await self._forward(asked)
            except InferenceError as error:
                await self._report(asked, error)
                return error.again()
            except (StrictModeError, ClientDisconnected):
                raise
            except Exception:
                # Around one request in a frontend: the others on the RPC continue.
                log.exception("request failed unexpectedly")
                await self._report(asked, unexpected())
            finally:
                if asked.trace is not None:
                    asked.trace.sent()
                if asked.receipt is not None:
                    asked.receipt.sent()
        return None

    async def refuse(self, refusal: bytes, position: OrderPosition | None) -> None:
        """Send the response to a refused request, in its place of the order."""
        with position or nullcontext():
            if position is not None:
                await position.reached()
            await self._outbox.put([refusal])

    async def _forward(self, asked: StreamRequest) -> None:
        batch = await _first_batch(asked)
        encode, next_batch = asked.encoder.encode_streamed, self._batches(asked)
        complete = False
        while batch:
            complete = batch[-1].final and _is_sent(asked, batch[-1])
            shown, error = marked(asked.stream, batch), None
            if asked.receipt is not None and batch[-1].final:
                shown = [*shown[:-1], with_timing(shown[-1], asked.receipt)]
            if self._strict:
                shown, error = _until_error(shown)
            # Whether it has outputs comes first: as `_is_sent`, without a call for each token.
            messages = [
                encode(response)
                for each, response in zip(batch, shown, strict=False)
                if each.outputs or _is_sent(asked, each)
            ]
            if messages and not self._outbox.is_busy:
                await self._send(asked, messages)
            elif messages:
                with self.unsent.counted(messages):
                    await self._send(asked, messages)
            if error is not None:
                raise StrictModeError(error)
            batch = await next_batch()
        if not complete and asked.empty_final:
            flag = with_timing(InferResponse(final=True), asked.receipt)
            await self._send(asked, [encode(flag)])

    def _batches(self, asked: StreamRequest) -> Callable[[], Awaitable[Sequence[InferResponse]]]:
        """Takes the next responses, of which texts may have been sent already.

        Not with the times of each response, or its number.
        """
        stream, is_timed = asked.stream, asked.trace is not None or asked.receipt is not None
        if is_timed or not isinstance(stream, ResponseStream):
            return stream.batch
        return PromptTexts(stream, asked.encoder, self._outbox).batch

    async def _forward_single(self, asked: StreamRequest) -> None:
        error: InferenceError | None = None
        messages: list[bytes] = []
        encode = asked.encoder.encode_streamed
        try:
            answer = replace(await asked.stream.only(), final=True)
            messages = [encode(with_timing(answer, asked.receipt))]
        except Interrupted as found:
            messages = [encode(each) for each in (*found.answers, INTERRUPTED)]
        except InferenceError as found:
            error = found
        with self.unsent.counted(messages):
            if asked.position is not None:
                await asked.position.reached()
            if error is not None:
                raise error
            await self._send(asked, messages)

    async def _report(self, asked: StreamRequest, error: InferenceError) -> None:
        if self._strict and not isinstance(error, RefusedError):
            raise StrictModeError(error)
        parameters = refusal_parameters(error)
        found = InferResponse(parameters=parameters, error=error, final=True)
        message = asked.encoder.encode_streamed(found)
        await self._send(asked, [message])

    async def _send(self, asked: StreamRequest, messages: Sequence[bytes]) -> None:
        """Send messages, and record the times in the trace of the request."""
        if asked.trace is not None:
            asked.trace.stamp("GRPC_SEND_START")
        if asked.receipt is None:
            await self._outbox.put(messages)
        else:
            since_ns = time.perf_counter_ns()
            await self._outbox.put(messages)
            asked.receipt.stalled(since_ns)
        if asked.trace is not None:
            asked.trace.stamp("GRPC_SEND_END")


async def _first_batch(asked: StreamRequest) -> Sequence[InferResponse]:
    """The first responses, once the position is reached; a refusal is raised at once."""
    position = asked.position
    if position is None:
        return await asked.stream.batch()
    try:
        batch = await asked.stream.batch()
    except InferenceError as error:
        if not isinstance(error, RefusedError):
            await position.reached()
        raise
    await position.reached()
    return batch


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


def marked(stream: Responses, batch: Sequence[InferResponse]) -> Sequence[InferResponse]:
    """The responses of the latest batch, with the parameters that a client needs to resume."""
    if not isinstance(stream, RecordingReader):
        return batch
    return [_marked(stream, event, response) for event, response in stream.numbered(batch)]


def _marked(stream: RecordingReader, event: EventId, response: InferResponse) -> InferResponse:
    told: dict[str, Parameter] = {EVENT: event.number}
    if stream.begins_with(event):
        told[STREAM] = event.token
    return replace(response, parameters={**response.parameters, **told})
