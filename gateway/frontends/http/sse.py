"""Server-sent events: how one is written, and the response that owns the stream it sends."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.types import Receive, Scope, Send

from gateway.errors import UNEXPECTED, InferenceError
from gateway.frontends.http.body import OnDisconnect
from gateway.frontends.http.codec import ResponseEncoder
from gateway.frontends.http.errors import error_body
from gateway.frontends.http.resumable import id_line, stream_headers
from gateway.messages import InferResponse
from gateway.resumption.reader import Reader, Responses
from gateway.settings import HttpSettings
from gateway.stream import has_data

log = logging.getLogger("sluice.http")

First = Sequence[InferResponse] | None
"""What the model has answered before the headers; None if that is still to come."""

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
ABORT = "abort"
"""Where a request's state has the function that drops its connection with what is unsent."""

# The server ends streams itself when it drains; the library must not cut them at a signal.
AppStatus.enable_automatic_graceful_drain = False


def event(data: bytes) -> bytes:
    """One event with one line of data."""
    return b"data: %b\n\n" % data


def keep_alive() -> ServerSentEvent:
    """The comment that fills silence, so that no proxy takes the connection for idle."""
    return ServerSentEvent(comment="keep-alive", sep="\n")


async def first_batch(stream: Responses, scope: Scope, within_secs: float) -> First:
    """What the model answers first, or None if that takes longer than clients should wait.

    A client that leaves meanwhile has left the stream.
    """
    try:
        with OnDisconnect(scope, stream.cancel):
            async with asyncio.timeout(within_secs):
                return await stream.batch()
    except TimeoutError:
        return None


class EventStream(EventSourceResponse):
    """Sends a stream as events: the first at once, later ones merged while a write is under way.

    It owns the stream: however sending ends, the stream is left, and so the model stops. Those of
    a recorded stream can come back to it. Subclasses say how events are written.
    """

    def __init__(
        self,
        stream: Responses,
        first: First,
        settings: HttpSettings,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        super().__init__(
            self._chunks(),
            headers={**headers, **stream_headers(stream)},
            sep="\n",
            ping=settings.keep_alive_secs,
            ping_message_factory=keep_alive,
            send_timeout=settings.send_timeout_secs,
        )
        self._stream = stream
        self._first = first

    @abstractmethod
    def encode_batch(self, batch: Sequence[InferResponse]) -> bytes:
        """The events of responses that have come together, with ids if the stream is recorded."""

    @abstractmethod
    def encode_failure(self, error: InferenceError) -> bytes:
        """The event that says that the rest will not come."""

    def encode_end(self) -> bytes:
        """What stands behind the last event, come what may."""
        return b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stream:
            try:
                await super().__call__(scope, receive, send)
            except SendTimeoutError:
                log.warning("client stopped reading", extra={"secs": self.send_timeout})
                await hang_up(scope, receive)

    async def _chunks(self) -> AsyncIterator[bytes]:
        try:
            batch = self._first if self._first is not None else await self._stream.batch()
            while batch:
                if chunk := self.encode_batch(batch):
                    yield chunk
                batch = await self._stream.batch()
        except InferenceError as error:
            yield self.encode_failure(error)
        except Exception:
            # Around one request in a frontend: the headers are gone, so this is an event, too.
            log.exception("request failed unexpectedly")
            yield self.encode_failure(UNEXPECTED)
        if end := self.encode_end():
            yield end


class StreamedResponse(EventStream):
    """The events of `generate_stream`. An error becomes one last event with an `error` member."""

    def __init__(
        self, stream: Responses, first: First, encoder: ResponseEncoder, settings: HttpSettings
    ) -> None:
        super().__init__(stream, first, settings)
        self._encoder = encoder

    def encode_batch(self, batch: Sequence[InferResponse]) -> bytes:
        encode = self._encoder.encode
        if not isinstance(self._stream, Reader):
            return b"".join([event(encode(response)) for response in batch if has_data(response)])
        numbered = self._stream.numbered(batch)
        events = [
            id_line(each) + event(encode(found)) for each, found in numbered if has_data(found)
        ]
        return b"".join(events)

    def encode_failure(self, error: InferenceError) -> bytes:
        return event(error_body(error.message))


async def hang_up(scope: Scope, receive: Receive) -> None:
    """Drop the connection of a client that takes nothing: closing it would wait for the client."""
    abort = scope.get("state", {}).get(ABORT)
    if abort is not None:
        abort()
        await receive()
