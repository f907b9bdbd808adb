"""Rules for the pings of a client."""

from collections.abc import Hashable

from gateway.settings import GrpcKeepaliveSettings

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
