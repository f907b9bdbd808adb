"""Arrivals of answers: the times at which the kernel received what a client reads later."""

import socket
import struct
import time
from http.client import HTTPConnection
from typing import Any

SO_TIMESTAMPNS = 35
"""The option of Linux for the time of the bytes of each read (asm-generic/socket.h)."""
SECONDS = struct.Struct("qq")
"""A time of the kernel: seconds and nanoseconds of the clock of the day."""
ANCILLARY_BYTES = 64
NS_PER_SECOND = 10**9


class StampedSocket(socket.socket):
    """A connected socket that notes when the kernel received the bytes of its latest read.

    `arrived_ns` is of `time.perf_counter_ns`; without a stamp, as of the first bytes after the
    option is set, it is the time of the read.
    """

    arrived_ns = 0

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """See `socket.recv_into`."""
        size, ancillary, _, _ = self.recvmsg_into([buffer], ANCILLARY_BYTES, flags)
        self.arrived_ns = time.perf_counter_ns()
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
                seconds, ns = SECONDS.unpack(data[: SECONDS.size])
                self.arrived_ns = seconds * NS_PER_SECOND + ns - _day_ahead_ns()
        return size


class StampedConnection(HTTPConnection):
    """A connection that knows when the kernel received the end of its latest answer."""

    def connect(self) -> None:
        """See `HTTPConnection.connect`."""
        super().connect()
        stamped = StampedSocket(fileno=self.sock.detach())
        stamped.settimeout(self.timeout)
        stamped.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.sock = stamped

    @property
    def arrived_ns(self) -> int:
        """See `StampedSocket`; 0 before the first answer."""
        return self.sock.arrived_ns if isinstance(self.sock, StampedSocket) else 0


def _day_ahead_ns() -> int:
    """The clock of the day less `time.perf_counter_ns`; a pause between both makes it smaller."""
    return max(time.time_ns() - time.perf_counter_ns() for _ in range(3))
