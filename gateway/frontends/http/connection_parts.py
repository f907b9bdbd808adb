"""Parts of a connection: time limits, requests, and smaller parts in place of uvicorn's.

These allocate nothing before they are needed: each event and each deque of the standard library
takes 760 bytes, also without a waiter or item.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.client_limits import pace_due
from gateway.frontends.http.errors import JSON, LINGER_SECS, error_body
from gateway.settings import HttpTimeLimits
from gateway.tensor import Buffer

log = logging.getLogger("sluice.http")

LENGTH = b"content-length"
HEAD_END = b"\r\n\r\n"
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
UPGRADE_BYTES = len(b"\r\nupgrade:")
HELD_SECS = 1.0
"""A timer this many seconds late was delayed by a blocked loop, as were the client's bytes."""
LINGER_BYTES = 64 << 20
"""The most bytes that are dropped behind a last response."""


class Signal:
    """An event, as `asyncio.Event`; its list of waiters exists while a task waits."""

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[asyncio.Future[None]] | None = None

    def set(self) -> None:
        """Set the event and wake all waiting tasks."""
        self._is_set = True
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    def clear(self) -> None:
        """Reset the event."""
        self._is_set = False

    async def wait(self) -> None:
        """Wait until the event is set."""
        if self._is_set:
            return
        waiter = asyncio.get_running_loop().create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter.cancelled() and self._waiters is not None:
                self._waiters.remove(waiter)


def use_signal(cycle: RequestResponseCycle) -> None:
    """Replace the event of a request by a signal in the same state."""
    signal = Signal()
    if cycle.message_event.is_set():
        signal.set()
    cycle.message_event = signal  # type: ignore[assignment]


class Flow(FlowControl):
    """Flow control with a small event, which is only awaited while writing is paused."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = False
        self.write_paused = False
        self._is_writable_event = Signal()  # type: ignore[assignment]
        self._is_writable_event.set()


class Pipeline(list[Any]):
    """The requests of a connection that wait for an earlier one; the last of the list is next."""

    __slots__ = ()

    def appendleft(self, item: Any) -> None:
        """Add a request behind all others."""
        self.insert(0, item)


def renamed_upgrade(tail: bytes, data: bytes) -> tuple[bytes, bytes]:
    """Bytes of a head with another name for `Upgrade`, and the tail of the head.

    httptools drops the body of a request with that header, as Java's client sends it; a server may
    ignore it (RFC 9110, 7.8). The tail is for the next bytes of the same head, which may have the
    rest of the name; b"" behind the end of the head.
    """
    joined = tail + data
    end = joined.find(HEAD_END)
    found = UPGRADE.search(joined, 0, end if end >= 0 else len(joined))
    if found:
        colon = found.end() - 1 - len(tail)
        data = data[:colon] + b"-x" + data[colon:]
    return data, joined[1 - UPGRADE_BYTES :] if end < 0 else b""


def content_length(value: bytes) -> int:
    """The number of a header that the parser has accepted; it may begin with thousands of zeros."""
    return int(value.strip().lstrip(b"0") or b"0")


def awaits_body(cycle: RequestResponseCycle) -> bool:
    """Whether the client sends the rest of a short body without being asked for it."""
    if not cycle.more_body or cycle.waiting_for_100_continue:
        return False
    length = next((value for name, value in cycle.scope["headers"] if name == LENGTH), None)
    return length is not None and content_length(length) <= HIGH_WATER_LIMIT


def lacks_body(cycle: RequestResponseCycle, answered: RequestResponseCycle | None) -> bool:
    """Whether a request, or the next one of its connection, waits for its body."""
    if cycle.response_complete:
        return True
    is_asked_for = not (cycle.flow.read_paused or cycle.waiting_for_100_continue)
    return is_asked_for and cycle is answered and not cycle.response_started


def has_late_body(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the body of a request with this head is not awaited: a long one, or a stream."""
    is_stream = b"transfer-encoding" in headers or b"expect" in headers
    return is_stream or content_length(headers.get(LENGTH, b"0")) > HIGH_WATER_LIMIT


def refusal(status: HTTPStatus, message: str) -> bytes:
    """The last response of a connection, to bytes that are no request."""
    body = error_body(message)
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\n"
        f"content-type: {JSON}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class DroppedRest(asyncio.Protocol):
    """Drops what a client still sends behind the last response of its connection.

    The connection closes with the client's end of it, after LINGER_SECS, or after LINGER_BYTES: a
    reset by unread bytes could take the response away (RFC 9112, 9.6). `before` is its protocol
    until now.
    """

    def __init__(self, transport: asyncio.Transport, before: asyncio.Protocol) -> None:
        self._before, self._transport, self._left = before, transport, LINGER_BYTES
        self._timer = asyncio.get_running_loop().call_later(LINGER_SECS, transport.close)
        if transport.can_write_eof():
            transport.write_eof()
        transport.set_protocol(self)

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._before.connection_lost(exc)


def end_refused(
    protocol: HttpToolsProtocol,
    answered: RequestResponseCycle | None,
    status: HTTPStatus,
    message: str,
) -> None:
    """End a connection with its last response; at once if a request awaits its answer."""
    transport = protocol.transport
    transport.write(refusal(status, message))
    is_awaited = answered is not None and not answered.response_complete
    if status is HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE and not is_awaited:
        DroppedRest(transport, protocol)
    else:
        transport.close()


def repeated(
    last: RequestResponseCycle, body: Buffer, on_response: Callable[[], None]
) -> RequestResponseCycle:
    """A whole request with the head of the last one of its connection, and another body."""
    cycle = RequestResponseCycle(
        last.scope,
        last.transport,
        last.flow,
        last.logger,
        last.access_logger,
        last.access_log,
        last.default_headers,
        Signal(),  # type: ignore[arg-type]
        expect_100_continue=False,
        keep_alive=last.keep_alive,
        on_response=on_response,
    )
    cycle.body += body
    cycle.more_body = False
    cycle.message_event.set()
    return cycle


class Owed(Enum):
    """The next bytes that a client has to send."""

    NOTHING = auto()
    """An answer is under way, or reading is paused."""
    HEAD = auto()
    """The rest of a request line with headers."""
    BODY = auto()
    REQUEST = auto()
    """The first byte of a request."""


class SendTimeout:
    """Drops a client that reads nothing for `secs`, from `start` until `cancel`."""

    __slots__ = ("_secs", "_timer")

    def __init__(self, secs: float) -> None:
        self._secs = secs
        self._timer: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.Transport) -> None:
        """Begin: output waits for the client."""
        loop, unsent = asyncio.get_running_loop(), transport.get_write_buffer_size()
        self._timer = loop.call_later(self._secs, self._look, transport, unsent)

    def cancel(self) -> None:
        """End: the client has read, or is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, transport: asyncio.Transport, unsent_before: int) -> None:
        if transport.get_write_buffer_size() < unsent_before:
            self.start(transport)
            return
        log.warning("client stopped reading", extra={"secs": self._secs})
        transport.abort()


class ClientDeadline:
    """Calls `expire` once, when the client has owed the same bytes for longer than their limit.

    A connection has one timer, which fires at intervals of the shortest limit. A request sets no
    timer: the limit restarts when `since` is set to the time of the loop, because the client owes
    other bytes, or has sent some. A body has a limit of its pace, too (`pace_due`).
    """

    __slots__ = (
        "_body_bytes",
        "_body_since",
        "_expected_at",
        "_expire",
        "_limits",
        "_loop",
        "_owed",
        "_round",
        "_timer",
        "since",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: HttpTimeLimits,
        owed: Callable[[], Owed],
        expire: Callable[[Owed, float], None],
    ) -> None:
        self._limits = _by_debt(limits)
        self._loop = loop
        self._owed = owed
        self._expire = expire
        self.since = self._expected_at = self._body_since = loop.time()
        self._body_bytes = 0
        self._round = min(self._limits.values(), default=0.0)
        self._timer: asyncio.TimerHandle | None = None
        if self._limits:
            self._look_in(self._round)

    def cancel(self) -> None:
        """Cancel the timer: the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take_body(self, size: int, *, begins: bool) -> None:
        """Bytes of a body have come, which is not complete; the body `begins` with the first."""
        self.since = self._loop.time()
        if begins:
            self._body_since, self._body_bytes = self.since, 0
        self._body_bytes += size

    def _look_in(self, secs: float) -> None:
        self._expected_at = self._loop.time() + secs
        self._timer = self._loop.call_later(secs, self._look)

    def _look(self) -> None:
        now, owed = self._loop.time(), self._owed()
        limit = self._limits.get(owed)
        if limit is None:
            # Time without a debt does not count; a debt may begin before the next check.
            self.since = self._body_since = now + self._round
            self._body_bytes = 0
            self._look_in(self._round)
        elif now - self._expected_at > HELD_SECS:
            self._look_in(HELD_SECS)
        elif (left := self._due(owed, limit) - now) > 0:
            self._look_in(min(left, self._round))
        else:
            self._timer = None
            self._expire(owed, limit)

    def _due(self, owed: Owed, limit: float) -> float:
        due = self.since + limit
        if owed is not Owed.BODY:
            return due
        return min(due, pace_due(self._body_since, self._body_bytes, limit))


@lru_cache
def _by_debt(limits: HttpTimeLimits) -> Mapping[Owed, float]:
    """The limit of each debt that has one; all connections share the result."""
    secs = limits.head_secs, limits.body_idle_secs, limits.connection_idle_secs
    debts = zip((Owed.HEAD, Owed.BODY, Owed.REQUEST), secs, strict=True)
    return {owed: limit for owed, limit in debts if limit}
