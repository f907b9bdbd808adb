"""Limits of one connection on hyper's HTTP/2: memory, time on the event loop, pings and age.

The overridden methods of httpunk are private: its release is pinned, and tests fail if they change.
"""

import asyncio
import random
import struct
from collections.abc import Callable, Hashable
from typing import Any

from httpunk import ConnectionClosedError, H2ProtocolError, H2Server, H2StreamError
from httpunk._httpunk import H2_HEADERS_OPENED
from httpunk.h2 import connection as library
from httpunk.h2.server import ServerRequest

from gateway.frontends.grpc import hyper_heads
from gateway.frontends.grpc.hyper_ends import GradualEnds
from gateway.frontends.grpc.status import RpcError, StatusCode
from gateway.settings import NEVER_MS, GrpcKeepaliveSettings

TURN_BYTES = 16 << 10
"""Maximum read of one connection per turn of the event loop; less for small frames."""

LARGE_TURN_BYTES = 64 << 10
"""Maximum read within a large frame, which is only copied."""

TURN_FRAMES = 64
"""Approximate maximum of frames of one connection per turn of the event loop."""

UNREAD_BYTES = 16 << 20
"""Unread data of one connection that does not count towards the budget."""

ENHANCE_YOUR_CALM = 11
FULL = "the server's buffers for incomplete and unsent messages are full"

PING, GO_AWAY = 6, 7
HEAD = struct.Struct(">BHBBL")
TOO_MANY_PINGS = b"too_many_pings"
"""Debug data of the GOAWAY; gRPC clients then ping half as often (gRPC proposal A8)."""

PING_DATA = b"alive?\r\n"
AGE_JITTER = 0.1
"""Random part of the maximum age, which spreads reconnects (gRPC proposal A9)."""


class BufferBudget:
    """Memory for incomplete and unsent messages of all connections, in bytes."""

    def __init__(self, size_bytes: int) -> None:
        self._free = size_bytes

    def reserve(self, size: int) -> None:
        """Reserve bytes; RpcError RESOURCE_EXHAUSTED if the budget is used up."""
        if size > self._free:
            raise RpcError(StatusCode.RESOURCE_EXHAUSTED, FULL)
        self._free -= size

    def release(self, size: int) -> None:
        """Return reserved bytes."""
        self._free += size


class BufferShare:
    """The bytes that one RPC or one connection has reserved."""

    __slots__ = ("_budget", "reserved")

    def __init__(self, budget: BufferBudget) -> None:
        self._budget = budget
        self.reserved = 0

    def add(self, size: int) -> None:
        """Reserve bytes; RpcError RESOURCE_EXHAUSTED if the budget is used up."""
        self._budget.reserve(size)
        self.reserved += size

    def change(self, size: int) -> None:
        """Reserve this number of bytes in place of the earlier reservation."""
        self.add(size - self.reserved)

    def clear(self) -> None:
        """Return all reserved bytes."""
        if self.reserved:
            self._budget.release(self.reserved)
            self.reserved = 0


def _acknowledgement() -> Any:
    codec = library.H2Codec("server")  # type: ignore[attr-defined] # it only imports the name
    codec.feed_preface(library.PREFACE)
    return codec.receive(bytes((0, 0, 0, 4, 1, 0, 0, 0, 0)))[0]


class BoundedConnection(GradualEnds, hyper_heads.AnnouncedHeads):
    """One connection whose unread data count towards the budget.

    The limits apply from the start, also if the client never acknowledges them.
    """

    greeted = False
    """Whether the client has sent its preface and its settings."""

    turn_bytes = TURN_BYTES
    """Maximum of the next read, in bytes."""

    _begun: list[Any]
    _is_closed = False
    _acknowledged = False
    _unfinished = _oversized = _received = _before = 0

    def _on_request(self, st: Any, frame: Any, eof: bool) -> None:
        """Override of httpunk: a request has started.

        It is served after all frames of the same read, without the queue of httpunk, which would
        cost a turn of the event loop.
        """
        many = len(frame.headers) + self._received / hyper_heads.READ_BYTES > hyper_heads.FEW
        is_large = st.id == self._oversized or (many and hyper_heads.is_large(frame))
        kind = hyper_heads.LargeRequest if is_large else ServerRequest
        self._begun.append(kind(st, self, frame))  # type: ignore[no-untyped-call]
        if eof:
            st.body_send.send(None)

    def maybe_goaway_reply(self) -> int:
        """Override of httpunk: all frames of a read are handled."""
        if self._begun:
            begun, self._begun = self._begun, []
            for request in begun:
                self._serve_request(request)
                # Requests that are reset before they are accepted count as a flood.
                self.accepted(request._stream.id)
        found: int = super().maybe_goaway_reply()
        return found

    def bound(self, budget: BufferBudget, serve: Callable[[Any], None]) -> None:
        """Count unread data towards `budget`, and pass requests to `serve`; call before reading."""
        self._share = BufferShare(budget)
        self._serve_request, self._begun = serve, []

    async def start(self) -> None:
        """Override of httpunk: start to read and to write."""
        await super().start()
        super().recv_settings(_acknowledgement())

    def recv_settings(self, frame: Any) -> tuple[bool, list[object], int]:
        """Override of httpunk: the settings of the client, or its acknowledgement of ours."""
        if frame.ack and not self._acknowledged:
            self._acknowledged = True
            return False, [], 0
        self.greeted = True
        return super().recv_settings(frame)

    def receive(self, data: bytes) -> list[Any]:
        """Override of httpunk: the frames completed by these bytes."""
        self._reserve_unread()
        frames = super().receive(data)
        if not frames:
            self._unfinished += len(data)
            if self._unfinished >= hyper_heads.METADATA_BYTES:  # within a large frame
                self.turn_bytes = LARGE_TURN_BYTES
            return frames
        first: Any = frames[0]
        large = self._unfinished >= hyper_heads.METADATA_BYTES and hasattr(first, "end_headers")
        self._oversized = first.stream_id if large else 0
        self._received = self._before + self._unfinished + len(data)  # a head may begin in each
        self._before, self._unfinished = len(data), 0
        self.turn_bytes = min(TURN_BYTES, TURN_FRAMES * (1 + len(data) // len(frames)))
        return frames

    def send_together(self, send: Callable[[], None], *, own: int = 0) -> None:
        """Call a function that sends frames, and write them at once.

        They wait for the writer if more streams are open than their `own`, since frames of those
        may follow soon, and while the client does not read.
        """
        event: Any = self._write_evt
        if event.is_set():
            send()  # the writer is about to write
            return
        event.hold()
        try:
            send()
        finally:
            event.clear()
            if self.has_pending():
                self._write_pending(own)

    def _write_pending(self, own: int) -> None:
        stream: Any = self._transport
        if self.num_streams > own or self._send_lock.locked() or not stream.may_write:
            self._write_evt.set()
            return
        data, _ = self.take_pending()
        stream.write(data)
        data.release()  # the buffer is used again, as by the writer of httpunk
        written: Any = self.credit_written()
        for handle in written:
            handle.window_evt.set()

    def recv_headers(self, frame: Any, spare: object | None = None) -> Any:
        """Override of httpunk: the headers of a request, or its trailers: large ones reset it."""
        verdict = super().recv_headers(frame, spare)
        if frame.stream_id == self._oversized and verdict.kind != H2_HEADERS_OPENED:
            raise H2StreamError(self._oversized, ENHANCE_YOUR_CALM, "library")
        return verdict

    def reset_on_error(self, sid: int, reason: int) -> Any:
        """Override of httpunk: reset a stream after a protocol error, and end its RPC."""
        verdict: Any = super().reset_on_error(sid, reason)
        if verdict.handle is not None:
            verdict.handle.reset_evt.set()
        return verdict

    def close_budget(self) -> None:
        """Return all reserved bytes after a disconnect, and reserve no more."""
        self._is_closed = True
        self._share.clear()

    def _reserve_unread(self) -> None:
        if self._is_closed:
            return
        unread = self._initial_connection_window_size - self.conn_recv_available
        if unread <= UNREAD_BYTES and not self._share.reserved:
            return
        try:
            self._share.change(max(0, unread - UNREAD_BYTES))
        except RpcError as error:
            raise H2ProtocolError(ENHANCE_YOUR_CALM, error.details) from None


class KeepaliveServer(H2Server):
    """httpunk's server of one connection, with the keep-alive of gRPC."""

    def __init__(
        self, stream: Any, socket: Any, settings: GrpcKeepaliveSettings, **options: Any
    ) -> None:
        self._conn: Any = KeepaliveConnection(stream, **options)  # type: ignore[no-untyped-call]
        self._conn.keepalive = Keepalive(self._conn, socket, settings)

    @property
    def connection(self) -> "KeepaliveConnection":
        """The connection, which handles frames."""
        found: KeepaliveConnection = self._conn
        return found

    def stop(self) -> None:
        """Stop the timers and return the reserved bytes after a disconnect."""
        self._conn.keepalive.stop()
        self._conn.close_budget()


class KeepaliveConnection(BoundedConnection):
    """Connection that reports pings and traffic to its keep-alive."""

    keepalive: "Keepalive"
    window_updates = 0

    def recv_ping(self, frame: Any) -> int:
        """Override of httpunk: a ping, or the answer to one."""
        self.keepalive.handle_ping(frame)
        found: int = super().recv_ping(frame)
        return found

    def recv_window_update(self, frame: Any) -> Any:
        """Override of httpunk: the client has read data."""
        self.window_updates += 1
        return super().recv_window_update(frame)

    def traffic(self) -> Hashable:
        """A value that changes when data or headers are sent."""
        return self.max_stream_id, self.num_streams, self.conn_send_window, self.window_updates

    def end(self) -> None:
        """Refuse new RPCs, and close when the running ones have ended."""
        self._after(self.begin_graceful_shutdown())  # type: ignore[no-untyped-call]


class Keepalive:
    """Pings a client, drops it without an answer, and ends the connection at its maximum age."""

    def __init__(
        self, connection: KeepaliveConnection, socket: Any, settings: GrpcKeepaliveSettings
    ) -> None:
        self._connection = connection
        self._socket = socket
        self._settings = settings
        self._strikes = PingStrikes(settings)
        self._loop = asyncio.get_running_loop()
        self._pings = 0
        self._traffic: Hashable = None
        self._awaits_answer = False
        self._ping_timer = self._later(settings.time_ms, self._ping)
        self._age_timer = self._later(
            settings.max_connection_age_ms * random.uniform(1 - AGE_JITTER, 1 + AGE_JITTER),
            self._end_old,
        )

    def stop(self) -> None:
        """Cancel the timers."""
        for timer in (self._ping_timer, self._age_timer):
            if timer is not None:
                timer.cancel()

    def handle_ping(self, frame: Any) -> None:
        """Handle a ping, or the answer to one; ConnectionClosedError after too many pings."""
        if frame.ack:
            if self._awaits_answer and frame.data == PING_DATA:
                self._answered()
            return
        idle = not self._connection.num_streams
        now, traffic = self._loop.time(), self._connection.traffic()
        if self._strikes.is_too_many(now, traffic, idle=idle):
            last = struct.pack(">LL", self._connection.last_processed_id, ENHANCE_YOUR_CALM)
            self._socket.write(_frame(GO_AWAY, last + TOO_MANY_PINGS))
            raise ConnectionClosedError("too many pings")

    def _later(self, delay_ms: float, act: Any, *arguments: Any) -> asyncio.TimerHandle | None:
        if not 0 < delay_ms < NEVER_MS:
            return None
        return self._loop.call_later(delay_ms / 1000, act, *arguments)

    def _ping(self) -> None:
        if self._socket.is_closing():
            return
        if not self._may_ping():
            self._ping_timer = self._later(self._settings.time_ms, self._ping)
            return
        # Each write of httpunk is a sequence of complete frames.
        self._socket.write(_frame(PING, PING_DATA))
        self._awaits_answer = True
        self._await_answer()

    def _may_ping(self) -> bool:
        traffic, limit = self._connection.traffic(), self._settings.max_pings_without_data
        self._pings = self._pings + 1 if traffic == self._traffic else 1
        self._traffic = traffic
        has_rpcs = self._connection.num_streams or self._settings.permit_without_calls
        return bool(has_rpcs) and (not limit or self._pings <= limit)

    def _await_answer(self) -> None:
        unsent = self._socket.get_write_buffer_size()
        self._ping_timer = self._later(self._settings.timeout_ms, self._check_answer, unsent)

    def _check_answer(self, unsent_before: int) -> None:
        """Drop a client that has neither answered nor read output since the ping."""
        if self._socket.get_write_buffer_size() < unsent_before:
            self._await_answer()
        else:
            self._socket.abort()

    def _answered(self) -> None:
        self._awaits_answer = False
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        self._ping_timer = self._later(self._settings.time_ms, self._ping)

    def _end_old(self) -> None:
        self._connection.end()
        grace_ms = self._settings.max_connection_age_grace_ms
        self._age_timer = self._later(grace_ms, self._socket.abort)


def _frame(kind: int, payload: bytes) -> bytes:
    """A frame on stream 0 (RFC 9113, 4.1)."""
    return HEAD.pack(0, len(payload), kind, 0, 0) + payload


IDLE_INTERVAL_SECS = 7200.0
"""Minimum interval of pings without an RPC, unless pings are permitted then."""


class PingStrikes:
    """Counter of a client's early pings, by gRPC's rules (gRPC proposal A8, C-core).

    Sending data to the client resets the counter.
    """

    def __init__(self, settings: GrpcKeepaliveSettings) -> None:
        self._permitted = settings.permit_without_calls
        self._interval_secs = settings.min_recv_ping_interval_ms / 1000
        self._limit = settings.max_ping_strikes
        self._strikes = 0
        self._latest = 0.0
        self._traffic: Hashable = None

    def is_too_many(self, now: float, traffic: Hashable, *, idle: bool) -> bool:
        """Count a ping at `now`, in seconds; whether the strikes exceed the limit.

        `traffic` changes when data are sent to the client; `idle` means that no RPC is open.
        """
        interval = IDLE_INTERVAL_SECS if idle and not self._permitted else self._interval_secs
        in_time = traffic != self._traffic or now - self._latest >= interval
        if traffic != self._traffic:
            self._strikes = 0
        self._latest, self._traffic = now, traffic
        if in_time:
            return False
        self._strikes += 1
        return 0 < self._limit < self._strikes
