"""The last open descriptors of this process, which connections leave to models and files."""

import asyncio
import logging
import resource
import time

log = logging.getLogger("sluice.server")

RESERVED = 64
"""Descriptors that connections do not take, or an eighth of the limit if that is less."""

LOG_SECS = 10.0
"""Dropped connections are logged at most once in this time."""


class DescriptorReserve:
    """Drops new connections of one port when only the reserve is left.

    The system gives out the lowest free descriptor, so its number says how many are open.
    """

    def __init__(self) -> None:
        self._dropped = 0
        self._log_at = 0.0

    def drops(self, transport: asyncio.BaseTransport) -> bool:
        """Whether a new connection takes a descriptor of the reserve; it is then closed."""
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
