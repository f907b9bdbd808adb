"""Reserve of file descriptors that connections must not take, for models and files."""

import asyncio
import logging
import resource
import time

log = logging.getLogger("sluice.server")

RESERVED = 64
"""Size of the reserve; an eighth of the limit (`ulimit -n`) if that is less."""

LOG_SECS = 10.0
"""Minimum interval between log lines on dropped connections."""


class DescriptorReserve:
    """Drops new connections of one port that would take a descriptor of the reserve.

    The system assigns the lowest free descriptor, so its number is the number of open ones.
    """

    def __init__(self) -> None:
        self._dropped = 0
        self._log_at = 0.0

    def drops(self, transport: asyncio.BaseTransport) -> bool:
        """Close a new connection that takes a descriptor of the reserve; whether it did."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        connection = transport.get_extra_info("socket")
        if connection is None or soft == resource.RLIM_INFINITY:
            return False
        if connection.fileno() < soft - min(RESERVED, soft // 8):
            return False
        transport.close()
        self._dropped += 1
        self._log(soft)
        return True

    def _log(self, limit: int) -> None:
        now = time.monotonic()
        if now >= self._log_at:
            log.warning("connections dropped", extra={"count": self._dropped, "ulimit_n": limit})
            self._dropped, self._log_at = 0, now + LOG_SECS
