"""Limits of one client on every wire: its connections, the pace of its bytes, their compression."""

import asyncio
import logging
import time
from collections import Counter
from ipaddress import ip_address, ip_network

from gateway.policy.caller import is_this_machine
from gateway.process_limits import LOG_SECS, DescriptorReserve

log = logging.getLogger("sluice.server")

CLIENT_PREFIX = 64
"""Bits of an IPv6 address that are those of a client: a client chooses the others."""

PACE_BYTES = 1024
"""Least bytes of a body or message in a second, on average,"""
PACE_AFTER_SECS = 10.0
"""after this time, or after the longest permitted pause if that is longer."""

FREE_BYTES = 64 << 20
"""Decompressed size up to which compressed data may have any ratio: tensors may be constant."""
MOST_RATIO = 100


def pace_due(began: float, size: int, idle_secs: float) -> float:
    """The time until which a client that has sent `size` bytes of a body keeps the pace.

    `began` is the time of the first byte, `idle_secs` the longest permitted pause, in seconds.
    """
    return began + max(PACE_AFTER_SECS, idle_secs) + size / PACE_BYTES


def late_text(what: str, idle_secs: float) -> str:
    """The text for a client that has sent nothing for a while, or too little."""
    return (
        f"no byte of the {what} came within {idle_secs:g} s, "
        f"or fewer than {PACE_BYTES} bytes in a second"
    )


def most_decompressed(size: int) -> int:
    """The largest permitted size of `size` compressed bytes once they are decompressed."""
    return max(FREE_BYTES, MOST_RATIO * size)


def too_compressed(what: str, size: int, encoding: str) -> str:
    """The text of the refusal of `size` compressed bytes that exceed that size."""
    return (
        f"{what} of {size} bytes in {encoding} has more than {most_decompressed(size)} bytes of "
        f"data, expected at most {MOST_RATIO} for each byte, or {FREE_BYTES}; send it uncompressed"
    )


class ConnectionLimits:
    """Drops connections of one port: of an address beyond `per_address`, and without descriptors.

    0 is no limit of an address. Clients on this machine have none, such as a proxy.
    """

    def __init__(self, per_address: int) -> None:
        self._most = per_address
        self._reserve = DescriptorReserve()
        self._clients: dict[asyncio.BaseTransport, str] = {}
        self._counts: Counter[str] = Counter()
        self._dropped = 0
        self._log_at = 0.0

    def drops(self, transport: asyncio.BaseTransport) -> bool:
        """Count a new connection, or close it beyond a limit; whether it was closed."""
        if self._reserve.drops(transport):
            return True
        client = self._client(transport)
        if not client:
            return False
        if self._counts[client] >= self._most:
            transport.close()
            self._log(client)
            return True
        self._clients[transport] = client
        self._counts[client] += 1
        return False

    def ended(self, transport: asyncio.BaseTransport) -> None:
        """A connection has ended."""
        client = self._clients.pop(transport, "")
        if client:
            self._counts[client] -= 1
            if not self._counts[client]:
                del self._counts[client]

    def _client(self, transport: asyncio.BaseTransport) -> str:
        """The limited part of the address of a client; "" for one without a limit."""
        name = transport.get_extra_info("peername") if self._most else None
        # A Unix socket has a path, and a connection that its client has reset has no address.
        if not isinstance(name, tuple) or is_this_machine(name[0]):
            return ""
        address = ip_address(name[0].partition("%")[0])
        if address.version == 4 or address.ipv4_mapped:
            return str(address)
        return str(ip_network((address, CLIENT_PREFIX), strict=False))

    def _log(self, client: str) -> None:
        self._dropped += 1
        now = time.monotonic()
        if now >= self._log_at:
            fields = {"count": self._dropped, "address": client, "max_per_address": self._most}
            log.warning("connections dropped", extra=fields)
            self._dropped, self._log_at = 0, now + LOG_SECS
