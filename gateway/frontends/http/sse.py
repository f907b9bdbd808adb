"""Server-sent events: how one is written, and the response that owns the stream it sends."""

import logging
from collections.abc import AsyncIterator, Sequence

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.types import Receive, Scope, Send

from gateway.errors import UNEXPECTED, InferenceError
from gateway.frontends.http.codec import ResponseEncoder, has_data
from gateway.frontends.http.errors import error_body
from gateway.messages import InferResponse
from gateway.settings import HttpSettings
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.http")

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


class StreamedResponse(EventSourceResponse):
    """Sends a stream as events: the first at once, later ones merged while a write is under way.

    It owns the stream: however sending ends, the stream is left, and so the model stops. An
    error becomes one last event with an `error` member.
    """

    def __init__(
        self,
        stream: ResponseStream,
        first: Sequence[InferResponse] | None,
        encoder: ResponseEncoder,
        settings: HttpSettings,
    ) -> None:
        super().__init__(
            self._chunks(),
            sep="\n",
            ping=settings.keep_alive_secs,
            ping_message_factory=keep_alive,
            send_timeout=settings.send_timeout_secs,
        )
        self._stream = stream
        self._first = first
        self._encoder = encoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stream:
            try:
                await super().__call__(scope, receive, send)
            except SendTimeoutError:
                log.warning("client stopped reading", extra={"secs": self.send_timeout})
                await _hang_up(scope, receive)

    async def _chunks(self) -> AsyncIterator[bytes]:
        try:
            batch = self._first if self._first is not None else await self._stream.batch()
            while batch:
                if chunk := self._encode(batch):
                    yield chunk
                batch = await self._stream.batch()
        except InferenceError as error:
            yield event(error_body(error.message))
        except Exception:
            # Around one request in a frontend: the headers are gone, so this is an event, too.
            log.exception("request failed unexpectedly")
            yield event(error_body(UNEXPECTED.message))

    def _encode(self, batch: Sequence[InferResponse]) -> bytes:
        encode = self._encoder.encode
        return b"".join([event(encode(response)) for response in batch if has_data(response)])


async def _hang_up(scope: Scope, receive: Receive) -> None:
    """Drop the connection of a client that takes nothing: closing it would wait for the client."""
    abort = scope.get("state", {}).get(ABORT)
    if abort is not None:
        abort()
        await receive()
