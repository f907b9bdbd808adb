"""The start of a router's connections: connect, then the handshake; and their pings."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

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
from gateway.processes.channel import NO_CALL, Channel, Frame, FrameTooLong
from gateway.settings import TlsSettings
from gateway.tls.certificates import client_context

CONNECT_SECS = 5.0


async def silence_after_ping(channel: Channel, secs: float) -> float:
    """Ping the other end, and wait, at most until it is lost; the time since it has sent a byte."""
    channel.send(FleetKind.PING)
    with suppress(TimeoutError):
        async with asyncio.timeout(secs):
            await channel.lost()
    return asyncio.get_running_loop().time() - channel.heard_at


class FleetAddress:
    """The address of a replica or of another router, and how this router is known to it."""

    def __init__(self, host: str, port: int, identity: Identity, tls: TlsSettings | None) -> None:
        self._place = host, port
        self.host = host
        self._identity = identity
        self._tls = tls

    def at(self, host: str, port: int) -> "FleetAddress":
        """Another address of the same process."""
        return FleetAddress(host, port, self._identity, self._tls)

    async def reach(
        self,
        on_agreed: Callable[[Channel, Hello], None],
        on_frame: Callable[[Frame], None],
        link: str = "",
    ) -> tuple[str, int]:
        """Connect and agree; returns the host and port of the other end.

        Frames after the handshake go to `on_frame`. `link` as in `Hello`.

        Raises HandshakeError, OSError, TimeoutError.
        """
        agreement = _Agreement(Handshake(self._identity, link), on_agreed, on_frame)
        async with asyncio.timeout(CONNECT_SECS):
            # Read again for each connection: a certificate may have been renewed.
            context: ssl.SSLContext | None = None
            if self._tls is not None:
                context = await asyncio.to_thread(client_context, self._tls)
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(
                lambda: agreement.channel, *self._place, ssl=context
            )
        peer = transport.get_extra_info("peername")
        try:
            await agreement.reached()
        except BaseException:
            agreement.channel.abort()
            raise
        # With the scope of an IPv6 address, as in `fe80::1%eth0`.
        host, port = socket.getnameinfo(peer, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
        return host, int(port)


class _Agreement:
    """The connecting end of a handshake on a channel."""

    def __init__(
        self,
        handshake: Handshake,
        on_agreed: Callable[[Channel, Hello], None],
        on_frame: Callable[[Frame], None],
    ) -> None:
        self._is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.channel = _ReachingChannel(self._on_frame, self._is_over)
        self._handshake = handshake
        self._on_agreed = on_agreed
        self._pass_on = on_frame
        self._proof = b""

    async def reached(self) -> None:
        """Agree with the other end; raises HandshakeError, TimeoutError."""
        self.channel.send(FleetKind.HELLO, NO_CALL, self._handshake.hello())
        lost = asyncio.ensure_future(self.channel.lost())
        try:
            async with asyncio.timeout(HANDSHAKE_SECS):
                await asyncio.wait((lost, self._is_over), return_when=asyncio.FIRST_COMPLETED)
            if not self._is_over.done():
                raise HandshakeError("it has disconnected during the handshake")
            self._is_over.result()
        finally:
            lost.cancel()

    def _on_frame(self, frame: Frame) -> None:
        if self._is_over.done():
            self._pass_on(frame)
            return
        try:
            proof = self._handshake.take(frame)
        except HandshakeError as error:
            self.channel.send(FleetKind.REFUSAL, NO_CALL, str(error).encode())
            self.channel.close()
            self._is_over.set_exception(error)
            return
        if proof is not None:
            self._proof = proof
        peer = self._handshake.peer
        if peer is not None:
            # After that of the replica: it sends nothing else before it has this one.
            self.channel.send(FleetKind.PROOF, NO_CALL, self._proof)
            self.channel.limit(MESSAGE_BYTES)
            self._is_over.set_result(None)
            self._on_agreed(self.channel, peer)


class _ReachingChannel(Channel):
    """A channel of which a first frame that is too long is the failure of the handshake."""

    def __init__(self, on_frame: Callable[[Frame], None], is_over: asyncio.Future[None]) -> None:
        super().__init__(on_frame, HANDSHAKE_BYTES)
        self._is_over = is_over

    def drop(self, error: FrameTooLong) -> None:
        if self._is_over.done():
            super().drop(error)
        else:
            text = f"it speaks another protocol: found {error}, expected HELLO"
            self._is_over.set_exception(HandshakeError(text))
            self.abort()
