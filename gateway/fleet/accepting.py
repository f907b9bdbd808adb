"""A port of a fleet: the connections of routers, from their handshakes to their ends."""

import asyncio
import logging
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from gateway.fleet.handshake import (
    HANDSHAKE_BYTES,
    HANDSHAKE_SECS,
    MESSAGE_BYTES,
    FleetKind,
    Handshake,
    HandshakeError,
    Hello,
    Identity,
)
from gateway.processes.channel import NO_CALL, Channel, Frame
from gateway.server import Listeners, StartFailed
from gateway.settings import FleetSettings, netloc
from gateway.tls.certificates import read_certificates

log = logging.getLogger("sluice.fleet")

MOST_ROUTERS = 1024
"""Connections of routers at one time, those in their handshake included."""
SILENT_SECS = 10.0
"""A router that sends nothing for this time is disconnected."""


class AcceptedChannel(Channel):
    """A channel that was accepted; `host` is the address of the other end."""

    host = ""

    def connection_made(self, transport: Any) -> None:
        peer = transport.get_extra_info("peername")
        self.host = peer[0] if peer else ""
        super().connection_made(transport)


class AcceptedLink(ABC):
    """The connection of one router: its handshake, then its frames.

    `peer` is the HELLO of the router, None until the handshake is over, and `router_id` its id.
    """

    def __init__(self, port: "AcceptingPort[Any]") -> None:
        self._accepting = port
        self._handshake: Handshake | None = Handshake(port.identity)
        self.nonce = self._handshake.nonce
        self.peer: Hello | None = None
        self.router_id = ""
        self._is_finishing = False
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(HANDSHAKE_SECS, self._expire)
        self.channel = AcceptedChannel(self._on_frame, HANDSHAKE_BYTES)
        self._watch = port.tasks.create_task(self._until_lost())

    @property
    def agreed(self) -> bool:
        """Whether the handshake is over."""
        return self.peer is not None

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether all that it is to send has been sent."""

    @abstractmethod
    def hear(self, frame: Frame) -> None:
        """Handle a frame after the handshake, other than PING."""

    @abstractmethod
    def begin(self) -> None:
        """Called once at the end of the handshake."""

    def check(self, handshake: Handshake) -> None:
        """Raise HandshakeError for another use of the connection than that of messages."""
        if handshake.link:
            raise HandshakeError("found a connection of large tensors, expected one of messages")

    def close(self) -> None:
        """Disconnect; open calls are cancelled."""
        self.channel.abort()
        # TLS that fails or does not begin neither makes nor loses the connection.
        self._watch.cancel()
        self.end()

    def finish(self, grace_secs: float) -> None:
        """Disconnect once it is idle, at the latest after the grace period."""
        self._is_finishing = True
        self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(grace_secs, self.close)
        self.finish_if_idle()

    def finish_if_idle(self) -> None:
        """Disconnect if `finish` was called, and it is idle now."""
        if self._is_finishing and self.is_idle:
            self.channel.close()

    def end(self) -> None:
        """Note the end of the connection."""
        self._expiry.cancel()
        self._accepting.links.discard(self)
        if self.peer is not None:
            self._accepting.changed(self.peer)

    async def _until_lost(self) -> None:
        try:
            await self.channel.lost()
        finally:
            self.end()

    def _expire(self) -> None:
        """Disconnect a router that is late with its handshake, or silent."""
        loop = asyncio.get_running_loop()
        silent_secs = loop.time() - self.channel.heard_at
        if self._handshake is not None:
            log.warning("router dropped", extra={"reason": "no handshake in time"})
            self.close()
        elif silent_secs >= SILENT_SECS:
            log.warning("router dropped", extra={"reason": f"silent for {silent_secs:.0f} s"})
            self.close()
        else:
            self._expiry = loop.call_later(SILENT_SECS - silent_secs, self._expire)

    def _on_frame(self, frame: Frame) -> None:
        if self._handshake is not None:
            self._agree(frame, self._handshake)
        elif frame.kind == FleetKind.PING:
            self.channel.send(FleetKind.PONG)
        else:
            self.hear(frame)

    def _agree(self, frame: Frame, handshake: Handshake) -> None:
        try:
            proof = handshake.take(frame)
            self.check(handshake)
        except HandshakeError as error:
            log.warning("router refused", extra={"reason": str(error)})
            self.channel.send(FleetKind.REFUSAL, NO_CALL, str(error).encode())
            self.channel.close()
            return
        if proof is not None:
            self.channel.send(FleetKind.HELLO, NO_CALL, handshake.hello())
            self.channel.send(FleetKind.PROOF, NO_CALL, proof)
        if handshake.peer is not None:
            self.agree(handshake.peer)

    def agree(self, peer: Hello) -> None:
        """End the handshake: the connection is one of messages."""
        self._handshake, self.peer, self.router_id = None, peer, peer.id
        self.channel.limit(MESSAGE_BYTES)
        log.info("router connected", extra={"id": self.router_id})
        self.begin()
        self._accepting.changed(peer)


L = TypeVar("L", bound=AcceptedLink)


class AcceptingPort(Listeners, Generic[L]):
    """A port for connections of routers, and the `inner` listeners of its process."""

    def __init__(self, identity: Identity, inner: Listeners, settings: FleetSettings) -> None:
        self.identity = identity
        self.links: set[L] = set()
        self.tasks: asyncio.TaskGroup
        self._inner = inner
        self._settings = settings
        self._server: asyncio.Server | None = None

    @abstractmethod
    def new_link(self) -> L:
        """The link of a new connection."""

    def changed(self, peer: Hello) -> None:
        """Called after a router has agreed, and after its end."""

    def agreed(self) -> list[L]:
        """The links of the routers that have agreed."""
        return [link for link in self.links if link.agreed]

    @property
    def ports(self) -> Mapping[str, int]:  # type: ignore[override]  # most need no property
        sockets = () if self._server is None else self._server.sockets
        own = {"fleet": sockets[0].getsockname()[1]} if sockets else {}
        return {**self._inner.ports, **own}

    async def bind(self) -> None:
        """Bind the port, without answering; StartFailed if it or a certificate cannot be used."""
        loop = asyncio.get_running_loop()
        place, tls = (self._settings.address, self._settings.port or 0), self._settings.tls
        try:
            context: ssl.SSLContext | None = None
            if tls is not None:
                context = (await asyncio.to_thread(read_certificates, tls)).context
            self._server = await loop.create_server(
                self._accept, *place, ssl=context, start_serving=False
            )
        except OSError as error:
            reason = error.strerror or str(error)
            raise StartFailed(f"cannot listen on {netloc(*place)} for fleet: {reason}") from None

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        self.tasks = tasks
        await self._inner.open(tasks)
        if self._server is not None:
            await self._server.start_serving()
        log.info("listening", extra={"for": "fleet", "port": self.ports["fleet"]})

    def stop_accepting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        if self._server is not None:
            self._server.close()
        self._inner.stop_accepting(tasks, grace_secs)

    def stop_waiting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        for link in tuple(self.links):
            link.finish(grace_secs)
        self._inner.stop_waiting(tasks, grace_secs)

    def _accept(self) -> asyncio.BaseProtocol:
        link = self.new_link()
        self.links.add(link)
        if len(self.links) > MOST_ROUTERS:
            log.warning("router refused", extra={"reason": f"{MOST_ROUTERS} are connected"})
            link.close()
        return link.channel
