"""How long does a connection on hyper's HTTP/2 last? Pings of both ends, and its age.

httpunk answers pings, and neither sends nor counts them. What is done here for that overrides
methods of its connection that it does not promise to keep: its release is pinned, and tests would
notice.
"""

import asyncio
import random
import struct
from collections.abc import Hashable
from typing import Any

from httpunk import ConnectionClosedError, H2Server

from gateway.frontends.grpc.hyper_limits import BoundedConnection
from gateway.settings import NEVER_MS, GrpcKeepaliveSettings

PING, GO_AWAY = 6, 7
HEAD = struct.Struct(">BHBBL")
ENHANCE_YOUR_CALM = 11
TOO_MANY_PINGS = b"too_many_pings"
"""What clients of gRPC look for: they then ping half as often (A8)."""

SIGN = b"alive?\r\n"
AGE_JITTER = 0.1
"""Connections that began together do not end together (gRPC proposal A9)."""


class KeepaliveServer(H2Server):
    """A connection's HTTP/2 server, with the pings and the age that gRPC gives it."""

    def __init__(
        self, stream: Any, socket: Any, settings: GrpcKeepaliveSettings, **options: Any
    ) -> None:
        self._conn: Any = KeepaliveConnection(stream, **options)  # type: ignore[no-untyped-call]
        self._conn.keepalive = Keepalive(self._conn, socket, settings)

    @property
    def connection(self) -> "KeepaliveConnection":
        """What drives the frames."""
        found: KeepaliveConnection = self._conn
        return found

    def stop(self) -> None:
        """The connection is gone: nothing is to be done for it any more."""
        self._conn.keepalive.stop()
        self._conn.leave()


class KeepaliveConnection(BoundedConnection):
    """Tells what its keep-alive needs to know."""

    keepalive: "Keepalive"
    window_updates = 0

    def recv_ping(self, frame: Any) -> int:
        """Of the library's: a ping, or the answer to one."""
        self.keepalive.heard(frame)
        found: int = super().recv_ping(frame)
        return found

    def recv_window_update(self, frame: Any) -> Any:
        """Of the library's: the client has taken data."""
        self.window_updates += 1
        return super().recv_window_update(frame)

    def traffic(self) -> Hashable:
        """Another value than before, once data or headers were sent."""
        return self.max_stream_id, self.num_streams, self.conn_send_window, self.window_updates

    def end(self) -> None:
        """Take no more RPCs, and close once those under way have ended."""
        self._after(self.begin_graceful_shutdown())  # type: ignore[no-untyped-call]


class Keepalive:
    """Pings a client, and cuts it off if it gives no sign of life; ends it when it is old.

    Its timers end with `stop`.
    """

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
        self._is_asked = False
        self._ping_timer = self._later(settings.time_ms, self._ask)
        self._age_timer = self._later(
            settings.max_connection_age_ms * random.uniform(1 - AGE_JITTER, 1 + AGE_JITTER),
            self._grow_old,
        )

    def stop(self) -> None:
        """Nothing more is to be done."""
        for timer in (self._ping_timer, self._age_timer):
            if timer is not None:
                timer.cancel()

    def heard(self, frame: Any) -> None:
        """A ping, or the answer to one; ConnectionClosedError if it is one too many."""
        if frame.ack:
            if self._is_asked and frame.data == SIGN:
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

    def _ask(self) -> None:
        if self._socket.is_closing():
            return
        if not self._may_ask():
            self._ping_timer = self._later(self._settings.time_ms, self._ask)
            return
        # Between two writes of the library's there is always a whole frame.
        self._socket.write(_frame(PING, SIGN))
        self._is_asked = True
        self._await_answer()

    def _may_ask(self) -> bool:
        traffic, limit = self._connection.traffic(), self._settings.max_pings_without_data
        self._pings = self._pings + 1 if traffic == self._traffic else 1
        self._traffic = traffic
        called = self._connection.num_streams or self._settings.permit_without_calls
        return bool(called) and (not limit or self._pings <= limit)

    def _await_answer(self) -> None:
        unsent = self._socket.get_write_buffer_size()
        self._ping_timer = self._later(self._settings.timeout_ms, self._look_again, unsent)

    def _look_again(self, unsent_before: int) -> None:
        """A client that still takes what is before the ping is alive."""
        if self._socket.get_write_buffer_size() < unsent_before:
            self._await_answer()
        else:
            self._socket.abort()

    def _answered(self) -> None:
        self._is_asked = False
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        self._ping_timer = self._later(self._settings.time_ms, self._ask)

    def _grow_old(self) -> None:
        self._connection.end()
        grace_ms = self._settings.max_connection_age_grace_ms
        self._age_timer = self._later(grace_ms, self._socket.abort)


def _frame(kind: int, payload: bytes) -> bytes:
    """A frame of the connection itself (RFC 9113, 4.1)."""
    return HEAD.pack(0, len(payload), kind, 0, 0) + payload


IDLE_INTERVAL_SECS = 7200.0
"""Between pings on a connection without an RPC, unless they are permitted."""


class PingStrikes:
    """A client's pings that came too soon after one another, with nothing sent in between."""

    def __init__(self, settings: GrpcKeepaliveSettings) -> None:
        self._permitted = settings.permit_without_calls
        self._interval_secs = settings.min_recv_ping_interval_ms / 1000
        self._limit = settings.max_ping_strikes
        self._strikes = 0
        self._latest = 0.0
        self._traffic: Hashable = None

    def is_too_many(self, now: float, traffic: Hashable, *, idle: bool) -> bool:
        """Count a ping at a time in seconds.

        `traffic` is another one than before if data went to the client, `idle` means that there is
        no RPC.
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
