"""A listener over TLS: requests, identities of clients, limits and the end, as without TLS."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.frontends.http.listener import HttpListener, listening_at
from gateway.frontends.http.request_scope import CERTIFICATE, HEADER_NAMES, WATCH
from gateway.settings import HttpTimeLimits, TlsSettings
from gateway.tls import connection as connection_module
from gateway.tls.certificates import Certificates
from tests.builders import settle, soon
from tests.certificates import Authority, Certificate

GRACE_SECS = 60.0
REQUEST = b"GET /x HTTP/1.1\r\nHost: localhost\r\nX-Name: 1\r\n\r\n"
LAST_REQUEST = b"GET /large HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
HELLO = b"\x16\x03\x01\x02\x00\x01"
LARGE_BYTES = 16 << 20


class App:
    """An application that notes the scopes of its requests; `/large` has LARGE_BYTES.

    `lost` is set once the connection of a request is lost.
    """

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.lost = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        scope["state"][WATCH](self.lost.set)
        await receive()
        body = b"x" * (LARGE_BYTES if scope["path"] == "/large" else 2)
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def certificates_of(own: Certificate, root: Path | str = "") -> Certificates:
    settings = TlsSettings(
        wire="http", cert=str(own.cert), key=str(own.key), root=str(root), mutual=bool(root)
    )
    return Certificates(settings)


class Served:
    """A listener, its application, and the task that serves."""

    def __init__(
        self, certificates: Certificates | None, app: ASGIApp | None = None, **options: Any
    ) -> None:
        self.app = App()
        listening, app = listening_at("127.0.0.1", 0), app or self.app
        self.listener = HttpListener(app, listening, certificates=certificates, **options)
        self.serving = asyncio.create_task(self.listener.serve())

    def end(self, grace_secs: float) -> None:
        self.listener.stop(grace_secs)
        self.listener.drop_half_requests()


@asynccontextmanager
async def served(
    certificates: Certificates | None, app: ASGIApp | None = None, **options: Any
) -> AsyncIterator[Served]:
    found = Served(certificates, app, **options)
    await settle()
    yield found
    found.end(0)
    await soon(found.serving)


@asynccontextmanager
async def session(
    server: Served, context: ssl.SSLContext
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    opening = asyncio.open_connection(
        "127.0.0.1", server.listener.port, ssl=context, server_hostname="localhost"
    )
    reader, writer = await soon(opening)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await soon(writer.wait_closed())


def plain(server: Served) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", server.listener.port))
    found.setblocking(False)
    return found


async def rest_of(client: socket.socket) -> bytes:
    """The bytes of the server before it ends the connection."""
    found = b""
    with suppress(ConnectionResetError):
        while data := await soon(asyncio.get_running_loop().sock_recv(client, 1 << 16)):
            found += data
    return found


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(REQUEST)
    head = await soon(reader.readuntil(b"\r\n\r\n"))
    assert head.startswith(b"HTTP/1.1 200 ")
    assert await soon(reader.readexactly(2)) == b"xx"


@pytest.mark.parametrize("header_names", [False, True])
@pytest.mark.parametrize("mutual", [False, True])
async def test_requests_have_the_scheme_and_the_identity_of_a_verified_client(
    authority: Authority, own: Certificate, mutual: bool, header_names: bool
) -> None:
    mine = authority.issue("mine", "URI:spiffe://prod/a")
    certificates = certificates_of(own, authority.root if mutual else "")
    async with (
        served(certificates, header_names=header_names) as server,
        session(server, authority.client(mine)) as (reader, writer),
    ):
        for _ in range(3):
            await asked(reader, writer)
        assert len(server.app.scopes) == 3
        for scope in server.app.scopes:
            assert scope["scheme"] == "https"
            found = scope["state"].get(CERTIFICATE)
            assert found == ("URI:spiffe://prod/a" if mutual else None)
            assert (CERTIFICATE in scope["state"]) is mutual
            assert scope["state"].get(HEADER_NAMES) == (
                [b"Host", b"X-Name"] if header_names else None
            )


async def test_a_request_without_tls_has_no_identity_and_its_scheme() -> None:
    async with served(None) as server:
        with plain(server) as client:
            client.send(REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            assert (await rest_of(client)).endswith(b"xx")
        (scope,) = server.app.scopes
        assert scope["scheme"] == "http"
        assert CERTIFICATE not in scope["state"]


async def test_a_client_without_tls_gets_an_error_that_names_the_scheme(own: Certificate) -> None:
    async with served(certificates_of(own)) as server:
        with plain(server) as client:
            client.send(REQUEST)
            answer = await rest_of(client)
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n")
        assert b'{"error":"this port is served over TLS, expected https:// in the URL"}' in answer


async def test_a_client_with_tls_at_a_port_without_is_refused(authority: Authority) -> None:
    async with served(None) as server:
        with pytest.raises(ssl.SSLError):
            async with session(server, authority.client()):
                pass
        assert server.app.scopes == []


async def test_a_hundred_half_handshakes_hold_up_no_request(
    authority: Authority, own: Certificate
) -> None:
    async with served(certificates_of(own)) as server:
        halves = [plain(server) for _ in range(100)]
        for each in halves[50:]:
            each.send(HELLO)
        async with session(server, authority.client()) as (reader, writer):
            await asked(reader, writer)
        for each in halves:
            each.close()


async def test_a_client_that_reads_nothing_is_dropped(
    authority: Authority, own: Certificate
) -> None:
    """Its whole response is passed on at once, and the connection closes behind it."""
    async with (
        served(certificates_of(own), send_timeout_secs=0.2) as server,
        session(server, authority.client()) as (reader, writer),
    ):
        writer.transport.pause_reading()
        writer.write(LAST_REQUEST)
        await soon(server.app.lost.wait())
        writer.transport.resume_reading()
        with suppress(OSError):
            assert len(await soon(reader.read())) < LARGE_BYTES


async def test_a_slow_reader_gets_all_of_a_closed_connection(
    authority: Authority, own: Certificate
) -> None:
    async with (
        served(certificates_of(own)) as server,
        session(server, authority.client()) as (reader, writer),
    ):
        writer.write(LAST_REQUEST)
        answer = await soon(reader.read())
    assert len(answer.partition(b"\r\n\r\n")[2]) == LARGE_BYTES


async def test_an_idle_connection_is_closed_at_its_limit(
    authority: Authority, own: Certificate
) -> None:
    limits = HttpTimeLimits(connection_idle_secs=0.05)
    async with (
        served(certificates_of(own), limits=limits) as server,
        session(server, authority.client()) as (reader, _),
    ):
        assert await soon(reader.read()) == b""


async def test_the_end_waits_for_no_idle_client_and_for_no_handshake(
    authority: Authority, own: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client without an event loop answers no `close_notify`."""
    monkeypatch.setattr(connection_module, "HANDSHAKE_SECS", GRACE_SECS)
    server = Served(certificates_of(own))
    await settle()
    context = authority.client()
    with (
        socket.create_connection(("127.0.0.1", server.listener.port)) as idle,
        plain(server) as silent,
        plain(server) as half,
        await asyncio.to_thread(context.wrap_socket, idle, server_hostname="localhost") as found,
    ):
        half.send(HELLO)
        await asyncio.to_thread(found.sendall, REQUEST)
        assert await asyncio.to_thread(found.recv, 4096)
        server.end(GRACE_SECS)
        await soon(server.serving)
        assert await rest_of(silent) == await rest_of(half) == b""
