"""TLS of accepted connections: the handshake, and the transport of the protocol above it.

asyncio's own TLS sends no alert to a client whose certificate it refuses, drops the rest of a
response that takes longer than a time limit after `close`, passes large writes to the socket at
once, and shows a connection to no protocol before its handshake has ended. With this transport the
limits of a connection without TLS hold with it, too.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from gateway.client_limits import ConnectionLimits
from gateway.tls.certificates import Certificates

Buffer = bytes | bytearray | memoryview

HANDSHAKE_SECS = 10.0
"""Time limit of a handshake."""
HANDSHAKE_RECORD = b"\x16"
"""The first byte of a client with TLS (RFC 8446, 5.1)."""
RECORD_BYTES = 16 << 10
"""Longest plaintext of a record (RFC 8446, 5.1)."""
PIECE_BYTES = 256 << 10
"""Bytes that are encrypted in one turn of the event loop, and while the socket takes them."""

log = logging.getLogger("sluice.server")


class TlsPort:
    """The TLS connections of one port.

    `refusal` is the answer to a client without TLS.
    """

    def __init__(
        self, certificates: Certificates, limits: ConnectionLimits, refusal: bytes = b""
    ) -> None:
        self.certificates = certificates
        self.limits = limits
        self.refusal = refusal
        self.handshakes: set[TlsConnection] = set()
        self.is_stopped = False

    def accept(self, create: Callable[[], asyncio.Protocol]) -> "TlsConnection":
        """A connection; its protocol is created after the handshake."""
        return TlsConnection(self, create)

    def stop(self) -> None:
        """Drop the connections whose handshake has not ended, also later ones."""
        self.is_stopped = True
        for each in tuple(self.handshakes):
            each.abort()


class TlsConnection(asyncio.Protocol, asyncio.Transport):
    """One connection: the protocol of the socket, and the transport of the protocol above.

    After `close` it sends the bytes written before and `close_notify`, and does not wait for that
    of the client (RFC 8446, 6.1). After `write_eof` it sends the same, and still reads.
    """

    __slots__ = (
        "_backlog",
        "_create",
        "_has_begun",
        "_has_ended",
        "_incoming",
        "_is_blocked",
        "_is_closing",
        "_is_due",
        "_is_flushing",
        "_is_paused",
        "_outgoing",
        "_port",
        "_protocol",
        "_session",
        "_socket",
        "_timer",
    )

    def __init__(self, port: TlsPort, create: Callable[[], asyncio.Protocol]) -> None:
        super().__init__()
        self._port = port
        self._create = create
        self._protocol: Any = None
        self._socket: Any = None
        self._session: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._backlog: list[memoryview] = []
        self._has_begun = False
        self._has_ended = False
        self._is_blocked = False
        self._is_paused = False
        self._is_closing = False
        self._is_flushing = False
        self._is_due = False

    # The protocol of the socket.

    def connection_made(self, transport: Any) -> None:
        port, self._socket = self._port, transport
        if port.is_stopped or port.limits.drops(transport):
            self.abort()
            return
        context = port.certificates.context
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        port.handshakes.add(self)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_SECS, self.abort)

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._incoming.write(data)
        if self._protocol is not None or self._shakes_hands(data):
            self._read()

    def eof_received(self) -> bool:
        if self._protocol is None:
            return False
        self._end_input()
        return True

    def pause_writing(self) -> None:
        self._is_blocked = True
        self._pause()

    def resume_writing(self) -> None:
        self._is_blocked = False
        if not self._is_due:
            self._send_backlog()

    def connection_lost(self, exc: Exception | None) -> None:
        self._port.limits.ended(self._socket)
        self._end()
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(exc)

    def _shakes_hands(self, data: bytes) -> bool:
        """Continue the handshake; whether it has succeeded, and the protocol has begun."""
        if not self._has_begun:
            self._has_begun = True
            if data[:1] != HANDSHAKE_RECORD:
                self._refuse(self._port.refusal)
                return False
        try:
            self._session.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            log.debug("TLS handshake failed", extra={"reason": error.reason or str(error)})
            self._refuse(self._outgoing.read())  # an alert
            return False
        self._end_handshake()
        self._flush()
        self._protocol = self._create()
        self._protocol.connection_made(self)
        return not self._is_closing

    def _end(self) -> None:
        """End the connection; what waits is dropped."""
        self._is_closing = True
        self._is_flushing = False
        self._backlog.clear()
        self._end_handshake()

    def _end_handshake(self) -> None:
        self._port.handshakes.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, last: bytes) -> None:
        self._end()
        self._socket.write(last)
        self._socket.close()

    def _read(self) -> None:
        """Pass on what the incoming records hold."""
        pieces: list[bytes] = []
        piece = b"-"
        try:
            while piece and (self._incoming.pending or self._session.pending()):
                piece = self._session.read(RECORD_BYTES)
                pieces.append(piece)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            self._refuse(self._outgoing.read())
            return
        if self._outgoing.pending:
            self._flush()
        if data := pieces[0] if len(pieces) == 1 else b"".join(pieces):
            self._protocol.data_received(data)
        if not piece:
            self._end_input()

    def _end_input(self) -> None:
        """Announce the end of the client's bytes, once; the protocol may keep its output open."""
        if not (self._has_ended or self._is_closing):
            self._has_ended = True
            if not self._protocol.eof_received():
                self.close()

    def _flush(self) -> None:
        self._socket.write(self._outgoing.read())

    def _pause(self) -> None:
        if self._protocol is not None and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def _send_backlog(self) -> None:
        """Send up to PIECE_BYTES of what waits, and the rest in later turns of the event loop."""
        self._is_due = False
        left = PIECE_BYTES
        while self._backlog and left and not self._is_blocked:
            piece = self._backlog.pop(0)
            if len(piece) > left:
                self._backlog.insert(0, piece[left:])
                piece = piece[:left]
            left -= len(piece)
            self._encrypt(piece)
        if self._is_blocked:
            return
        if self._backlog:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._send_backlog)
        elif self._is_flushing:
            self._end_output()
        elif self._is_paused and not self._is_closing:
            self._is_paused = False
            self._protocol.resume_writing()

    def _encrypt(self, data: Buffer) -> None:
        try:
            self._session.write(data)
        except ssl.SSLError:
            self.abort()
        else:
            self._socket.write(self._outgoing.read())

    def _end_output(self) -> None:
        """Send `close_notify` behind what waits; close the socket then, if it is to be closed."""
        self._is_flushing = bool(self._backlog)
        if self._is_flushing:
            return
        with suppress(ssl.SSLError):
            self._session.unwrap()
        self._flush()
        if self._is_closing:
            self._socket.close()

    # The transport of the protocol.

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._session
        if name == "sslcontext":
            return self._session.context
        return self._socket.get_extra_info(name, default)

    def write(self, data: Buffer) -> None:
        if self._is_closing or not data:
            return
        if self._backlog:
            self._backlog.append(memoryview(data))
        elif len(data) <= PIECE_BYTES:
            self._encrypt(data)
        else:
            self._backlog.append(memoryview(data))
            self._pause()
            self._send_backlog()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._is_closing:
            self._end_output()

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        for data in list_of_data:
            self.write(data)

    def get_write_buffer_size(self) -> int:
        found: int = self._socket.get_write_buffer_size()
        return found + sum(map(len, self._backlog))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._socket.set_write_buffer_limits(high, low)

    def is_reading(self) -> bool:
        found: bool = self._socket.is_reading()
        return found

    def pause_reading(self) -> None:
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_closing:
            self._socket.resume_reading()

    def is_closing(self) -> bool:
        return self._is_closing or self._socket.is_closing()

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._socket.pause_reading()
        self._end_output()

    def abort(self) -> None:
        self._end()
        self._socket.abort()
