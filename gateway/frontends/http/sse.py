"""Server-sent events, and the responses that send a stream of them."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from itertools import chain
from types import MappingProxyType

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.errors import InferenceError, RefusedError, unexpected
from gateway.frontends.http.errors import (
    STATUS,
    error_body,
    error_headers,
    log_refusal,
    refused,
    status_of,
)
from gateway.frontends.http.generate_codec import GenerateEncoder
from gateway.frontends.http.json_tensors import is_large
from gateway.frontends.http.keep_alive import SilenceFiller, silence_comment
from gateway.frontends.http.request_scope import (
    HANDOVER,
    OnDisconnect,
    PendingResponse,
    SendPiece,
    WritePiece,
    id_line,
    piece_sender,
    piece_writer,
    stream_headers,
)
from gateway.frontends.http.timing import stalling, timing_comment
from gateway.messages import InferResponse
from gateway.observability.receipt import Receipt
from gateway.resumption.reader import RecordingReader, Responses
from gateway.settings import HttpSettings
from gateway.stream import ResponseStream, has_data
from gateway.threads import Threads

log = logging.getLogger("sluice.http")

First = Sequence[InferResponse] | None
"""The responses before the headers are sent; None if there are none yet."""

EncodeText = Callable[[str, bytes], bytes | None]
"""Makes the event of a text with the name of its output; None if `encode_batch` has to."""

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
EVENT_STREAM_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-store",
        "connection": "keep-alive",
        "x-accel-buffering": "no",
    }
)
"""Headers of every stream of events: proxies must neither cache nor buffer it."""

BETWEEN = b"\n\ndata: "
"""The end of one event's data and the begin of the next."""


def event(data: bytes) -> bytes:
    """One event with one line of data."""
    return b"data: %b\n\n" % data


async def first_batch(stream: Responses, scope: Scope, within_secs: float) -> First:
    """The first responses of the model, or None after `within_secs`.

    If the client disconnects meanwhile, the stream is cancelled.
    """
    try:
        with OnDisconnect(scope, stream.cancel):
            async with asyncio.timeout(within_secs):
                return await stream.batch()
    except TimeoutError:
        return None


def first_status(responses: Sequence[InferResponse]) -> int:
    """The status of the first response, as on Triton."""
    error = responses[0].error if responses else None
    return HTTPStatus.OK if error is None else status_of(error, STATUS)


def refused_stream(path: str, error: InferenceError) -> Response:
    """A stream of one event: an error in place of the model's first response.

    Triton decides the status of a stream by its first response (generate extension). A request that
    is refused before it is queued gets a JSON error.
    """
    if isinstance(error, RefusedError):
        return refused(path, error)
    log_refusal(path, error)
    headers = {**EVENT_STREAM_HEADERS, **error_headers(error)}
    return Response(event(error_body(error.message)), status_of(error, STATUS), headers)


class EventStream(Response):
    """Sends a stream as events: the first at once, later ones merged while a write is under way.

    It owns the stream: when sending ends in any way, the stream is closed and the model stops. A
    recorded stream continues and can be resumed. The connection drops a client that reads nothing.
    Subclasses encode the events. A `receipt` ends with the sending.
    """

    receipt: Receipt | None = None

    def __init__(
        self,
        stream: Responses,
        first: First,
        settings: HttpSettings,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        self.status_code = first_status(first or ())
        self.background = None
        self.init_headers({**EVENT_STREAM_HEADERS, **headers, **stream_headers(stream)})
        self._stream = stream
        self._first = first
        self._silence_secs = settings.keep_alive_secs
        self.sent_at = 0.0

    @abstractmethod
    def encode_batch(self, batch: Sequence[InferResponse]) -> bytes | None:
        """The events of a batch of responses, with ids if the stream is recorded.

        None if the batch is large: `encode_large` encodes it.
        """

    @property
    def text_encoder(self) -> EncodeText | None:
        """Encodes the event of a response with one text; None if `encode_batch` encodes all."""
        return None

    async def encode_large(self, batch: Sequence[InferResponse]) -> bytes:
        """The events of large responses, encoded without blocking the event loop."""
        raise NotImplementedError

    @abstractmethod
    def encode_failure(self, error: InferenceError) -> bytes:
        """The event for an error that ends the stream."""

    def encode_end(self) -> bytes:
        """The bytes behind the last event, also after an error."""
        return b""

    def encode_receipt(self, receipt: Receipt) -> bytes:
        """The receipt, if no event has had it."""
        return timing_comment(receipt)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stream:
            try:
                async with asyncio.timeout(None) as stay:
                    with OnDisconnect(scope, partial(_end_sending, stay)):
                        await self._send_all(scope, send)
            except TimeoutError:
                return  # the client has disconnected
            finally:
                if self.receipt is not None:
                    self.receipt.sent()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        end = b""
        await send(self._head())
        if scope["method"] != "HEAD":
            put, write = piece_sender(scope, send), piece_writer(scope)
            answer = put if self.receipt is None else stalling(put, self.receipt)
            self.sent_at = asyncio.get_running_loop().time()
            with SilenceFiller(
                put, write, self._silence_secs, lambda: self.sent_at, self._silence_comment
            ):
                await self._send_batches(answer, write)
            end = self.encode_end()
            if self.receipt is not None:
                end = self.encode_receipt(self.receipt) + end
        await send({"type": "http.response.body", "body": end, "more_body": False})

    def _silence_comment(self) -> bytes:
        return silence_comment(self._stream.model_at)

    def _head(self) -> Message:
        """The message with the headers, which are not kept: a stream may live for hours."""
        headers, self.raw_headers = self.raw_headers, []
        return {"type": "http.response.start", "status": self.status_code, "headers": headers}

    async def _send_batches(self, put: SendPiece, write: WritePiece | None) -> None:
        time = asyncio.get_running_loop().time
        next_batch: Callable[[], Awaitable[Sequence[InferResponse]]] = self._stream.batch
        if write is not None and isinstance(self._stream, ResponseStream):
            next_batch = partial(_unwritten, self, self._stream, write)
        try:
            batch, self._first = self._first, None
            if batch is None:
                batch = await self._stream.batch()
            while batch:
                chunk = self.encode_batch(batch)
                if chunk is None:
                    chunk = await self.encode_large(batch)
                if chunk:
                    await put(chunk)
                    self.sent_at = time()
                batch = await next_batch()
        except InferenceError as error:
            await put(self.encode_failure(error))
        except Exception:
            # Around one request in a frontend: the headers are sent, so the error is an event.
            log.exception("request failed unexpectedly")
            await put(self.encode_failure(unexpected()))


class _DirectWrites:
    """Writes a stream's events in the code that puts them, so that no task wakes for a token.

    `left` gets the first batch that cannot be written so, empty at the end. A second batch within a
    turn of the loop is written at the next one, with those that follow.
    """

    __slots__ = ("_deferred", "_encode", "_events", "_loop", "_stream", "_write", "left")

    def __init__(self, events: EventStream, stream: ResponseStream, write: WritePiece) -> None:
        self._events = events
        self._encode = events.text_encoder
        self._stream = stream
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._deferred: asyncio.Handle | None = None
        self.left: asyncio.Future[Sequence[InferResponse]] = self._loop.create_future()

    def write_texts(self, name: str, texts: Sequence[bytes]) -> bool:
        """Write the events of texts; False if they have to be put into the stream."""
        events, encode, now = self._events, self._encode, self._loop.time()
        if encode is None or self._deferred is not None or self.left.done():
            return False
        if len(texts) > 1:
            chunks = [encode(name, text) for text in texts]
            chunk = None if None in chunks else b"".join(chunks)  # type: ignore[arg-type]
        elif now == events.sent_at:
            return False  # several come together already
        else:
            chunk = encode(name, texts[0])
        if chunk is None or not self._write(chunk):
            return False
        events.sent_at = now
        return True

    def write_unread(self, *, is_due: bool = False) -> None:
        """Write what is unread in the stream."""
        events, stream = self._events, self._stream
        if is_due:
            self._deferred = None
        elif self._deferred is not None:
            return
        elif self._loop.time() == events.sent_at and not stream.done:
            # uvloop's time is that of its turn, in milliseconds.
            self._deferred = self._loop.call_soon(partial(self.write_unread, is_due=True))
            return
        try:
            while not self.left.done() and (batch := stream.take()) is not None:
                chunk = events.encode_batch(batch) if batch else None
                if chunk and self._write(chunk):
                    events.sent_at = self._loop.time()
                elif chunk != b"":
                    self.left.set_result(batch)
                if not stream.done:
                    break
        except Exception as error:  # noqa: BLE001 - ends the request, in its own task
            self.left.set_exception(error)


async def _unwritten(
    events: EventStream, stream: ResponseStream, write: WritePiece
) -> Sequence[InferResponse]:
    """The next batch that could not be written as soon as it came; empty at the end."""
    writes = _DirectWrites(events, stream, write)
    stream.listen(writes.write_unread, writes.write_texts)
    return await writes.left


class GenerateEvents(EventStream):
    """The events of `generate_stream`. An error becomes an event with an `error` member.

    It is the last event if the error has ended the request. Large events are encoded in a thread.
    """

    def __init__(
        self,
        stream: Responses,
        first: First,
        encoder: GenerateEncoder,
        settings: HttpSettings,
        threads: Threads,
    ) -> None:
        super().__init__(stream, first, settings)
        self._encoder = encoder
        self._threads = threads

    def encode_batch(self, batch: Sequence[InferResponse]) -> bytes | None:
        if not isinstance(self._stream, RecordingReader):
            texts = [*map(self._encoder.encode_text, batch)]
            if None not in texts:
                # As `event`, without a call for each token.
                return b"data: %b\n\n" % BETWEEN.join(texts)  # type: ignore[arg-type]
        return None if _is_large(batch) else self._events(batch)

    @property
    def text_encoder(self) -> EncodeText:
        return self._encode_text

    def _encode_text(self, name: str, text: bytes) -> bytes | None:
        data = self._encoder.encode_element(name, text)
        return None if data is None else b"data: %b\n\n" % data

    async def encode_large(self, batch: Sequence[InferResponse]) -> bytes:
        return await self._threads.run(self._events, batch)

    def _events(self, batch: Sequence[InferResponse]) -> bytes:
        encode = self._encoder.encode
        if not isinstance(self._stream, RecordingReader):
            return b"".join([event(encode(response)) for response in batch if has_data(response)])
        numbered = self._stream.numbered(batch)
        events = [
            id_line(each) + event(encode(found)) for each, found in numbered if has_data(found)
        ]
        return b"".join(events)

    def encode_failure(self, error: InferenceError) -> bytes:
        return event(error_body(error.message))

    def encode_receipt(self, receipt: Receipt) -> bytes:
        if receipt.asked and not (receipt.told or receipt.failure):
            return event(self._encoder.encode(InferResponse(final=True)))
        return super().encode_receipt(receipt)


def _is_large(batch: Sequence[InferResponse]) -> bool:
    return is_large(chain.from_iterable([response.outputs for response in batch]))


def _end_sending(stay: asyncio.Timeout) -> None:
    """End sending: the client has disconnected. May be called more than once."""
    if not stay.expired():
        stay.reschedule(0)


class PendingEvents(Response):
    """The response to a request for a stream, before the first responses of the model.

    They decide the status: `begin` makes the response of them, or of None after `within_secs`.
    `refuse` makes it of an error before the first response. It owns the stream, as EventStream.
    """

    def __init__(
        self,
        stream: Responses,
        within_secs: float,
        begin: Callable[[First], Response],
        refuse: Callable[[InferenceError], Response],
    ) -> None:
        self._stream = stream
        self._within_secs = within_secs
        self._begin = begin
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hand_over: Callable[[PendingResponse], None] | None = scope.get(HANDOVER)
        if hand_over is not None:
            hand_over(self.response)
            return
        response = await self.response(scope)
        await response(scope, receive, send)

    async def response(self, scope: Scope) -> Response:
        """The response, which owns the stream if it sends events."""
        with ExitStack() as owner:
            owner.enter_context(self._stream)
            try:
                first = await first_batch(self._stream, scope, self._within_secs)
                response = self._begin(first)
            except InferenceError as error:
                return self._refuse(error)
            except Exception:
                # Around one request in a frontend: only the log has the traceback.
                log.exception("request failed unexpectedly")
                return self._refuse(unexpected())
            if isinstance(response, EventStream):
                owner.pop_all()
        return response
