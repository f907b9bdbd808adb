"""The connections of a router to other ones, made for the calls that need them."""

import asyncio
import logging
from collections.abc import Sequence

from gateway.fleet.connection import GONE_SECS, PING_SECS
from gateway.fleet.handshake import HandshakeError, Hello, Identity
from gateway.fleet.reaching import FleetAddress, silence_after_ping
from gateway.fleet.routers import Place
from gateway.processes.channel import Channel, Frame, call_numbers
from gateway.settings import TlsSettings, netloc

log = logging.getLogger("sluice.fleet")

REACH_SECS = 2.0
"""Time limit of an attempt, for all places together."""
PAUSE_SECS = 2.0
"""The time after a failed attempt in which there is no other one."""
IDLE_SECS = 60.0
"""A connection without calls for this time is closed."""


class RouterAbsent(Exception):
    """The other router cannot be connected, or drains."""


class PeerRouter:
    """Another router; its connection is made for a call, and closed once it has been idle.

    `places` are those where it may be. `numbers` are those of calls, `calls` counts the open ones.
    """

    def __init__(
        self, router_id: str, identity: Identity, tls: TlsSettings | None, tasks: asyncio.TaskGroup
    ) -> None:
        self.id = router_id
        self.places: Sequence[Place] = ()
        self.numbers = call_numbers()
        self.calls = 0
        self._identity = identity
        self._tls = tls
        self._tasks = tasks
        self._channel: Channel | None = None
        self._lock = asyncio.Lock()
        self._used_at = self._retry_at = 0.0

    async def channel(self) -> Channel:
        """The connection, for a call that begins without a further wait.

        RouterAbsent if it cannot be made, also for a while after a failed attempt.
        """
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._channel is None or self._channel.is_lost:
                if loop.time() < self._retry_at:
                    raise RouterAbsent
                self._channel = await self._connected()
                self._tasks.create_task(self._keep(self._channel))
        self._used_at = loop.time()
        return self._channel

    async def _connected(self) -> Channel:
        reasons = []
        for place in self.places:
            try:
                async with asyncio.timeout(REACH_SECS / len(self.places)):
                    return await self._reach(place)
            except (HandshakeError, OSError, TimeoutError, UnicodeError) as error:
                reasons.append(f"{netloc(*place)}: {error or 'it does not answer'}")
        self._retry_at = asyncio.get_running_loop().time() + PAUSE_SECS
        log.warning("router not reached", extra={"id": self.id, "reason": "; ".join(reasons)})
        raise RouterAbsent

    async def _reach(self, place: Place) -> Channel:
        agreed: list[tuple[Channel, Hello]] = []

        def on_agreed(channel: Channel, peer: Hello) -> None:
            agreed.append((channel, peer))

        await FleetAddress(*place, self._identity, self._tls).reach(on_agreed, _ignore)
        ((channel, peer),) = agreed
        if peer.id != self.id:
            channel.abort()
            raise HandshakeError(f"found router {peer.id}, expected {self.id}")
        return channel

    async def _keep(self, channel: Channel) -> None:
        """Ping until the router is lost, silent for too long, or no longer needed."""
        time = asyncio.get_running_loop().time
        try:
            while not channel.is_lost:
                if await silence_after_ping(channel, PING_SECS) > GONE_SECS:
                    break
                if not self.calls and time() - self._used_at > IDLE_SECS:
                    break
        finally:
            if self._channel is channel:
                self._channel = None
            channel.abort()


def _ignore(frame: Frame) -> None:
    """A PONG, or a frame of an ended call."""
