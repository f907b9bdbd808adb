"""HTTP/1.1 connections: uvicorn's protocol with bounds on heads and output, and time limits."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from itertools import chain
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.client_limits import ConnectionLimits, late_text
from gateway.event_loop import WRITES
from gateway.frontends.http.connection_parts import (
    HEAD_END,
    LENGTH,
    LINGER_BYTES,
    UPGRADE,
    ClientDeadline,
    Flow,
    Owed,
    Pipeline,
    SendTimeout,
    awaits_body,
    end_refused,
    lacks_body,
    renamed_upgrade,
    repeated,
    use_signal,
)
from gateway.frontends.http.request_scope import (
    BEGIN_STREAM,
    BEGUN_NS,
    SEND_PIECE,
    SEND_WHOLE,
    WATCH,
    WRITE_PIECE,
    Begin,
    Parts,
    RawHeaders,
    send_whole,
)
from gateway.settings import HttpTimeLimits

log = logging.getLogger("sluice.http")

MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED = 16
"""Pipelined requests of a connection; beyond this number reading pauses."""

HEAD, LONG = "request line and headers", f"exceed {MAX_HEAD_BYTES} bytes"
TOO_LARGE, LATE = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with bounds.

    A request line with its headers has at most MAX_HEAD_BYTES, and so have the chunk extensions
    and trailers of a body. A head that begins within a read is measured once it is whole.
    Malformed requests get a JSON error behind the earlier responses. A client that reads nothing
    for `send_timeout_secs` is dropped, even if its response is complete; one that does not send
    the bytes that it owes within `limits` gets 408, or is dropped where no response is possible.
    No limit runs while a request is answered. One with a short body starts when that has arrived.

    A request whose head is that of the last one, byte for byte, and which arrives in one piece or
    as head and body, is begun without the parser, with the same scope: clients repeat heads.
    """

    # Python shares the keys of up to 30 attributes among instances; uvicorn's protocol has 29.
    __slots__ = (
        "_answered",
        "_begin",
        "_begun",
        "_connections",
        "_deadline",
        "_framing_bytes",
        "_has_begun",
        "_has_known_head",
        "_head_bytes",
        "_head_tail",
        "_in_head",
        "_known_bytes",
        "_known_head",
        "_limits",
        "_on_disconnect",
        "_receiving",
        "_refusal",
        "_send_timeout",
        "_unstarted",
    )

    def __init__(
        self,
        *arguments: Any,
        send_timeout_secs: float,
        limits: HttpTimeLimits,
        connections: ConnectionLimits,
        begin: Begin | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._unstarted: tuple[RequestResponseCycle, Any] | None = None
        self._begun = self._has_begun = self._has_known_head = False
        self._known_head, self._known_bytes, self._head_tail = b"", -1, b""
        self.pipeline = Pipeline()  # type: ignore[assignment]
        self._begin, self._send_timeout = begin, SendTimeout(send_timeout_secs)
        self._limits, self._connections = limits, connections
        self._in_head, self._head_bytes, self._framing_bytes = True, 0, 0
        self._on_disconnect: Callable[[], object] | None = None
        self._answered: RequestResponseCycle | None = None
        self._receiving: RequestResponseCycle | None = None
        self._refusal: tuple[HTTPStatus, str] | None = None

    @property
    def is_receiving(self) -> bool:
        """Whether a request has arrived without the end of its body."""
        return self._has_known_head or not self._in_head

    def watch(self, on_disconnect: Callable[[], object] | None) -> None:
        """Call `on_disconnect` when the client disconnects, at once if it has; None ends that."""
        self._on_disconnect = on_disconnect
        if on_disconnect is None:
            return
        if self.flow.read_paused:
            self._read_on()
        if self.transport.is_closing():
            # `connection_lost` is still to come: drop the rest of the answer now.
            if self._answered is not None:
                self._answered.disconnected = True
            on_disconnect()

    def _read_on(self) -> None:
        """Resume reading while a request is in flight: only a read notices a disconnect."""
        if self._on_disconnect is not None and len(self.pipeline) < MAX_PIPELINED:
            self.flow.resume_reading()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)
        self._deadline = ClientDeadline(self.loop, self._limits, self._owed, self._expire)
        self._connections.drops(transport)

    def _owed(self) -> Owed:
        if self._has_known_head:
            return Owed.BODY
        if self._receiving is not None:
            return Owed.BODY if lacks_body(self._receiving, self._answered) else Owed.NOTHING
        if self.cycle is not None and not self.cycle.response_complete:
            return Owed.NOTHING
        return Owed.HEAD if self._has_begun else Owed.REQUEST

    def _expire(self, owed: Owed, limit_secs: float) -> None:
        """Refuse a request that has begun; close a connection without one."""
        if self.transport.is_closing():
            return
        self._parse_known_head()
        if not self._has_begun:
            self.transport.close()
        elif owed is Owed.HEAD:
            log.debug("request head timed out", extra={"secs": limit_secs})
            self._refuse(LATE, f"{HEAD} took longer than {limit_secs:g} s")
        else:
            log.warning("request body timed out", extra={"secs": limit_secs})
            self._refuse(LATE, late_text("request body", limit_secs))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timeout.start(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._send_timeout.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._send_timeout.cancel()
        self._deadline.cancel()
        self._connections.ended(self.transport)
        super().connection_lost(exc)
        # uvicorn notifies only the latest request, not the answered one if requests are pipelined.
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        if self._on_disconnect is not None:
            self._on_disconnect()
        # Drop what refers to this object: without a cycle its memory is free at once.
        del self._deadline
        if self._unstarted or self._answered is None or self._answered.response_complete:
            self.cycle = self._answered = self._receiving = self._unstarted = None  # type: ignore[assignment]
            self.scope = None  # type: ignore[assignment]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun, self._begun = True, False
        self._known_head, self._known_bytes = b"", -1
        self._deadline.since = self.loop.time()
        self.scope["state"] = {
            SEND_PIECE: self._send_piece,
            WRITE_PIECE: self._write_piece,
            SEND_WHOLE: self._send_whole,
            WATCH: self.watch,
            BEGIN_STREAM: self._begin_stream,
            BEGUN_NS: time.perf_counter_ns(),
        }

    def on_headers_complete(self) -> None:
        if sum(map(len, chain.from_iterable(self.headers)), len(self.url)) > MAX_HEAD_BYTES:
            self._refuse(TOO_LARGE, f"{HEAD} {LONG}")
            raise ValueError(LONG)  # it ends the parser
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()
        self.headers = []  # trailers are not merged into the headers (RFC 9110, 6.5.1)
        self._receiving = self.cycle
        if not self.pipeline:
            self._answered = self.cycle
        if self._on_disconnect is not None:
            self._read_on()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start a request; one that has just arrived is started at the end of `data_received`."""
        if self._begin is not None and cycle.more_body and self._receiving is None:
            self._unstarted = cycle, app
        else:
            super()._start_asgi_task(cycle, app)

    def _start(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Begin a request without a task if it has arrived as a whole, or start its task."""
        self._unstarted = None
        start = super()._start_asgi_task
        if cycle.more_body or self._begin is None or not self._begin(cycle, partial(start, cycle)):
            self._known_head, self._known_bytes = b"", -1  # an application may change the scope
            start(cycle, app)
        else:
            self._begun = True

    def _learn_head(self, data: bytes) -> None:
        """Know the head of a request, if these bytes are the request, or are its head."""
        head, end, body = data.partition(HEAD_END)
        if self._begun:
            self._learn(head + end, len(body))
        elif self._unstarted is not None and end and not body:
            self._known_head = data

    def _learn(self, head: bytes, body_bytes: int) -> None:
        """Know the head of a request that was begun, if its body was the other bytes received."""
        if (LENGTH, b"%d" % body_bytes) in self.scope["headers"] and not self.expect_100_continue:
            self._known_head, self._known_bytes = head, len(head) + body_bytes

    def _repeats(self, data: bytes) -> bool:
        """Begin the request, if it has the head of the last one; or wait for its body."""
        last, head = self.cycle, self._known_head
        is_known = len(data) in (len(head), self._known_bytes) and data.startswith(head)
        if not (is_known and last.response_complete) or self.transport.is_closing():
            return False
        if len(data) == len(head) < self._known_bytes:
            self._has_known_head = True
            self._deadline.take_body(0, begins=True)
        else:
            body = memoryview(data)[len(head) :]
            self.cycle = self._answered = repeated(last, body, self.on_response_complete)
            self._start(self.cycle, self.app)
        return True

    def _parse_known_head(self) -> None:
        """Pass the known head to the parser, if it has arrived without a body."""
        if self._has_known_head:
            self._known_bytes = -1
            self.data_received(b"")

    def shutdown(self) -> None:
        self._parse_known_head()
        super().shutdown()

    def _begin_stream(self) -> None:
        """Replace the event of a request whose body has been read: an event takes 760 bytes."""
        use_signal(self._answering)

    async def _send_whole(self, headers: RawHeaders, parts: Parts) -> None:
        """Send a whole response. A function of the request would make a cycle with its scope."""
        await send_whole(self._answering, headers, parts)

    async def _send_piece(self, piece: bytes) -> None:
        """Send a piece of the response body, as ASGI's message would, once there is room for it."""
        cycle = self._answering
        while not self._write_piece(piece) and not cycle.disconnected:
            await cycle.flow.drain()

    def _write_piece(self, piece: bytes) -> bool:
        """Write a piece of the body; False if the client has to read first, or has gone."""
        cycle = self._answered
        if cycle is None or cycle.disconnected or cycle.flow.write_paused:
            return False
        if cycle.chunked_encoding:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        else:
            cycle.expected_content_length -= len(piece)
        if WRITES.collected is None:
            self.transport.write(piece)
        else:
            WRITES.collected.append((self.transport, piece))
        return True

    @property
    def _answering(self) -> RequestResponseCycle:
        assert self._answered is not None  # noqa: S101 - a request is being answered
        return self._answered

    def on_response_complete(self) -> None:
        """Start the next request, as uvicorn does; the deadline measures idle time."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._deadline.since = self.loop.time()
        self.flow.resume_reading()
        if self.pipeline:
            self._answered, app = self.pipeline.pop()
            self._start_asgi_task(self._answered, app)
        elif self._refusal is not None:
            end_refused(self, self._answered, *self._refusal)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._has_begun = True, False
        self._receiving, self._framing_bytes = None, 0
        super().on_message_complete()
        if self._unstarted is not None:
            self._start(*self._unstarted)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            self._framing_bytes += len(data)
            if self._framing_bytes > LINGER_BYTES:
                self.flow.pause_reading()  # until the answers before the refusal are sent
            return
        if self._has_known_head:
            self._has_known_head = False
            data = self._known_head + data
        elif self._known_bytes >= 0:
            self.scope["state"][BEGUN_NS] = time.perf_counter_ns()  # that of a repeated head
        begins = self._in_head
        is_first = begins and not self._has_begun
        if is_first and self._known_bytes >= 0 and self._repeats(data):
            return
        self._begun = False
        self._parse(data)
        if is_first:
            self._learn_head(data)
        elif self._begun and self._known_head:
            self._learn(self._known_head, len(data))
        if self._unstarted is not None and not awaits_body(self._unstarted[0]):
            self._start(*self._unstarted)
        if not self._in_head:
            self._deadline.take_body(len(data), begins=begins)

    def _parse(self, data: bytes) -> None:
        """Pass the parser what it may have; refuse the rest."""
        if self._in_head:
            end = data.find(HEAD_END)
            if end < 0 or self._head_tail or UPGRADE.search(data, 0, end):
                data, self._head_tail = renamed_upgrade(self._head_tail, data)
        while data and self._refusal is None and not self.transport.is_closing():
            data = data[self._feed(data) :]

    def _feed(self, data: bytes) -> int:
        """Pass the parser as many bytes as it may have, and return their number."""
        if not self._in_head:
            self._framing_bytes += len(data)
            super().data_received(data)
            if self._framing_bytes > MAX_HEAD_BYTES:
                self._refuse(TOO_LARGE, f"trailers or chunk extensions {LONG}")
            return len(data)
        piece = data[: MAX_HEAD_BYTES - self._head_bytes]
        if piece:
            self._head_bytes += len(piece)
            super().data_received(piece)
        else:
            self._refuse(TOO_LARGE, f"{HEAD} {LONG}")
        return len(piece)

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """End the connection with this response, behind those to earlier requests."""
        received, answered = self._receiving, self._answered
        if self._refusal is not None or self.transport.is_closing():
            return
        if received is not None and received.response_started:
            self.transport.abort()  # more bytes would be part of that response
            return
        self._deadline.cancel()
        self._refusal = status, message
        if answered is None or answered is received or answered.response_complete:
            end_refused(self, answered, status, message)
        elif received is not None:
            del self.pipeline[0]  # its place is that of the refusal
