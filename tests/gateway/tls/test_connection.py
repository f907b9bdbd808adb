"""Connections over TLS: handshakes, output that the client reads late, ends of both sides."""

import asyncio
import os
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from gateway.settings import TlsSettings
from gateway.tls import connection as connection_module
from gateway.tls.certificates import Certificates
from tests.builders import settle, soon, uncollected
from tests.certificates import Authority, Certificate
from tests.gateway.tls.peers import (
    HELLO,
    LARGE,
    REFUSED,
    Port,
    SlowSocket,
    client,
    rest_of,
    serving,
    until,
    wire,
)


@pytest.fixture
async def port(server: Certificate) -> AsyncIterator[Port]:
    async with serving(Port(server, "")) as found:
        yield found


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handshakes do not end by themselves while a test runs."""
    monkeypatch.setattr(connection_module, "HANDSHAKE_SECS", 1000.0)


async def test_both_sides_read_what_the_other_writes(port: Port, authority: Authority) -> None:
    async with client(port, authority.client()) as (reader, writer):
        writer.write(b"echo")
        assert await soon(reader.readexactly(4)) == b"echo"
        writer.write(LARGE)
        await until(lambda: port.peer.received == b"echo" + LARGE)
        port.peer.transport.writelines([b"head", b"", memoryview(LARGE)])
        assert await soon(reader.readexactly(4 + len(LARGE))) == b"head" + LARGE


async def test_a_connection_shows_its_session_and_its_socket(
    port: Port, authority: Authority
) -> None:
    async with client(port, authority.client()) as (_, writer):
        await until(lambda: port.peers)
        found = port.peer.transport.get_extra_info
        assert found("ssl_object").version() == "TLSv1.3"
        assert found("sslcontext") is port.tls.certificates.context
        assert found("peername") == writer.get_extra_info("sockname")
        assert found("nothing", 3) == 3


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_versions_from_1_2_on_are_served_with_the_protocol_of_the_port(
    port: Port, authority: Authority, version: ssl.TLSVersion
) -> None:
    context = authority.client()
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with client(port, context) as (reader, writer):
        session = writer.get_extra_info("ssl_object")
        assert session.selected_alpn_protocol() == "http/1.1"
        writer.write(b"echo")
        assert await soon(reader.readexactly(4)) == b"echo"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1")
async def test_an_older_version_gets_an_alert(port: Port, authority: Authority) -> None:
    context = authority.client()
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        async with client(port, context):
            pass
    assert port.peers == []


@pytest.mark.parametrize("kind", ["none", "foreign", "expired", "good"])
async def test_a_client_certificate_is_demanded_and_its_refusal_is_an_alert(
    server: Certificate, authority: Authority, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    """Under TLS 1.3 the client has sent its request by then, and reads the alert."""
    shown: dict[str, Callable[[], Certificate | None]] = {
        "none": lambda: None,
        "foreign": lambda: Authority(tmp_path_factory.mktemp("a") / "b").issue("x"),
        "expired": lambda: authority.issue_expired("expired"),
        "good": lambda: authority.issue("good"),
    }
    alerts = {
        "none": "CERTIFICATE_REQUIRED",
        "foreign": "UNKNOWN_CA",
        "expired": "CERTIFICATE_EXPIRED",
    }
    async with (
        serving(Port(server, str(authority.root))) as port,
        client(port, authority.client(shown[kind]())) as (reader, writer),
    ):
        writer.write(b"echo")
        if kind == "good":
            assert await soon(reader.readexactly(4)) == b"echo"
        else:
            with pytest.raises(ssl.SSLError, match=alerts[kind]):
                await soon(reader.readexactly(4))
            assert port.peers == []


async def test_a_client_without_tls_gets_the_refusal(port: Port) -> None:
    with wire(port) as client:
        client.send(b"GET / HTTP/1.1\r\n\r\n")
        assert await rest_of(client) == REFUSED
    assert port.peers == []


async def test_bytes_that_only_begin_as_tls_end_the_connection(port: Port) -> None:
    with wire(port) as client:
        client.send(b"\x16\x03\x01\xff\xff" + b"x" * 70_000)
        await rest_of(client)
    assert port.peers == []


async def test_a_half_handshake_ends_at_its_limit_also_if_bytes_keep_coming(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HANDSHAKE_SECS", 0.05)
    with wire(port) as silent, wire(port) as half:
        half.send(HELLO)
        ending = asyncio.create_task(rest_of(half))
        while not ending.done():
            await asyncio.sleep(0.01)
            with suppress(OSError):
                half.send(b"\x00")
        await ending
        await rest_of(silent)
    assert not port.tls.handshakes


async def test_a_finished_handshake_has_no_limit(
    port: Port, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HANDSHAKE_SECS", 1.0)
    async with client(port, authority.client()) as (reader, writer):
        await asyncio.sleep(1.2)
        writer.write(b"echo")
        assert await soon(reader.readexactly(4)) == b"echo"


@pytest.mark.usefixtures("unlimited")
async def test_a_stop_drops_handshakes_and_leaves_connections(
    port: Port, authority: Authority
) -> None:
    async with client(port, authority.client()) as (reader, writer):
        with wire(port) as half, wire(port) as late:
            await until(lambda: len(port.tls.handshakes) == 2)
            port.tls.stop()
            assert await rest_of(half) == await rest_of(late) == b""
        with wire(port) as late:
            assert await rest_of(late) == b""
        writer.write(b"echo")
        assert await soon(reader.readexactly(4)) == b"echo"


@pytest.mark.usefixtures("unlimited")
async def test_a_connection_beyond_a_limit_is_dropped_before_its_handshake(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port.tls.limits, "drops", lambda transport: True)
    with wire(port) as client:
        assert await rest_of(client) == b""
    assert not port.tls.handshakes


async def test_output_waits_for_the_client(port: Port, authority: Authority) -> None:
    async with client(port, authority.client(), buffer=1 << 16) as (reader, _):
        await until(lambda: port.peers)
        peer = port.peer
        peer.transport.set_write_buffer_limits(1 << 16)
        peer.transport.write(3 * LARGE)
        assert peer.events == ["made", "pause"]
        unsent = peer.transport.get_write_buffer_size()
        assert unsent > len(LARGE)
        peer.transport.write(b"end")
        assert peer.transport.get_write_buffer_size() == unsent + 3
        assert await soon(reader.readexactly(3 * len(LARGE) + 3)) == 3 * LARGE + b"end"
        await until(lambda: peer.events[-1] == "resume")
        assert peer.events == ["made", "pause", "resume"]
        assert peer.transport.get_write_buffer_size() == 0


async def test_output_is_encrypted_as_the_client_reads(
    server: Certificate, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large response would hold the event loop; the pieces keep their order."""
    monkeypatch.setattr(connection_module, "PIECE_BYTES", 1 << 10)
    port, sent = Port(server, ""), SlowSocket(4 << 10)
    connection = port.tls.accept(port.create)
    sent.attach(connection, authority.client())
    peer = port.peer
    peer.transport.write(LARGE[: 64 << 10])
    peer.transport.writelines([b"after", LARGE[: 32 << 10]])
    assert peer.events == ["made", "pause"]
    expected, found = LARGE[: 64 << 10] + b"after" + LARGE[: 32 << 10], b""
    for _ in range(len(expected) >> 9):
        assert len(sent.unread) < 8 << 10
        found += sent.read()
        await asyncio.sleep(0)
    assert found == expected
    assert peer.events == ["made", "pause", "resume"]
    peer.transport.abort()
    connection.connection_lost(None)


async def test_a_large_output_does_not_hold_the_event_loop(
    port: Port, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the socket takes all of it: one piece is encrypted in a turn."""
    monkeypatch.setattr(connection_module, "PIECE_BYTES", 1 << 10)
    async with client(port, authority.client()) as (reader, _):
        await until(lambda: port.peers)
        peer = port.peer
        peer.transport.write(LARGE[: 16 << 10])
        assert peer.events == ["made", "pause"]
        for turn in range(1, 16):
            assert peer.transport.get_write_buffer_size() >= (16 - turn) << 10
            await asyncio.sleep(0)
        assert await soon(reader.readexactly(16 << 10)) == LARGE[: 16 << 10]
        await until(lambda: peer.events == ["made", "pause", "resume"])


async def test_a_closed_connection_sends_what_it_has_and_says_so(
    port: Port, authority: Authority
) -> None:
    async with client(port, authority.client(), buffer=1 << 16) as (reader, _):
        await until(lambda: port.peers)
        peer = port.peer
        peer.transport.set_write_buffer_limits(1 << 16)
        peer.transport.write(3 * LARGE)
        peer.transport.close()
        assert peer.transport.is_closing()
        peer.transport.write(b"dropped")
        assert await soon(reader.read(-1)) == 3 * LARGE
        await soon(peer.lost.wait())
        assert peer.events == ["made", "pause", "lost"]


async def test_a_connection_that_is_closed_while_it_is_paused_is_not_resumed(
    port: Port, authority: Authority
) -> None:
    """A limit for clients that read nothing runs on."""
    async with client(port, authority.client(), buffer=1 << 16) as (reader, _):
        await until(lambda: port.peers)
        peer, piece, count = port.peer, LARGE[: 200 << 10], 0
        while "pause" not in peer.events:
            peer.transport.write(piece)
            count += 1
        peer.transport.close()
        assert len(await soon(reader.read(-1))) == count * len(piece)
        await soon(peer.lost.wait())
        assert peer.events == ["made", "pause", "lost"]


async def test_an_idle_connection_is_closed_without_the_client(
    port: Port, authority: Authority
) -> None:
    """As without TLS: it does not wait for the close_notify of a client that reads nothing."""
    plain = socket.create_connection(("127.0.0.1", port.port))
    with plain:
        plain.settimeout(5)
        context = authority.client()
        session = await asyncio.to_thread(context.wrap_socket, plain, server_hostname="localhost")
        with session:
            await until(lambda: port.peers)
            port.peer.transport.close()
            await soon(port.peer.lost.wait())
            assert await asyncio.to_thread(session.recv, 1) == b""


@pytest.mark.parametrize("stays_open", [False, True])
async def test_the_end_of_a_clients_bytes_closes_the_connection_unless_it_stays_open(
    port: Port, authority: Authority, stays_open: bool
) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = authority.client().wrap_bio(incoming, outgoing, server_hostname="localhost")
    loop = asyncio.get_running_loop()
    with wire(port) as client:
        while not port.peers:
            with suppress(ssl.SSLWantReadError):
                session.do_handshake()
            client.send(outgoing.read())
            incoming.write(await soon(loop.sock_recv(client, 1 << 16)))
        port.peer.stays_open = stays_open
        with pytest.raises(ssl.SSLWantReadError):
            session.unwrap()
        client.send(outgoing.read())
        await until(lambda: "eof" in port.peer.events)
        if stays_open:
            port.peer.transport.write(b"answer")
            port.peer.transport.close()
        incoming.write(await rest_of(client))
        if stays_open:
            assert session.read(10) == b"answer"
        with pytest.raises(ssl.SSLZeroReturnError):
            session.read(10)
        await soon(port.peer.lost.wait())
        assert port.peer.events == ["made", "eof", "lost"]


async def test_a_client_that_disconnects_without_notice_has_ended_its_bytes(
    port: Port, authority: Authority
) -> None:
    async with client(port, authority.client()) as (_, writer):
        await until(lambda: port.peers)
        writer.transport.abort()
        await soon(port.peer.lost.wait())
        assert port.peer.events[-1] == "lost"


async def test_broken_records_end_a_connection_with_an_alert(
    port: Port, authority: Authority
) -> None:
    with socket.create_connection(("127.0.0.1", port.port), timeout=5) as plain:
        context = authority.client()
        with await asyncio.to_thread(
            context.wrap_socket, plain, server_hostname="localhost"
        ) as session:
            with socket.socket(fileno=os.dup(session.fileno())) as raw:
                raw.send(b"\x17\x03\x03\x00\x20" + b"x" * 32)
            with pytest.raises(ssl.SSLError, match="BAD_RECORD_MAC"):
                await asyncio.to_thread(session.recv, 1)
    await soon(port.peer.lost.wait())
    assert port.peer.events == ["made", "lost"]


async def test_a_paused_connection_reads_no_more_until_it_is_resumed(
    port: Port, authority: Authority
) -> None:
    async with client(port, authority.client()) as (reader, writer):
        await until(lambda: port.peers)
        port.peer.transport.pause_reading()
        assert not port.peer.transport.is_reading()
        writer.write(b"echo")
        await settle()
        await asyncio.sleep(0.05)
        assert port.peer.received == b""
        port.peer.transport.resume_reading()
        assert await soon(reader.readexactly(4)) == b"echo"


async def test_a_new_certificate_is_that_of_new_connections(
    port: Port, authority: Authority
) -> None:
    async with client(port, authority.client()) as (reader, writer):
        before = writer.get_extra_info("peercert")["serialNumber"]
        new = authority.issue("next")
        settings = TlsSettings(wire="http", cert=str(new.cert), key=str(new.key))
        port.tls.certificates = Certificates(settings)
        async with client(port, authority.client()) as (_, other):
            assert other.get_extra_info("peercert")["serialNumber"] != before
        writer.write(b"echo")
        assert await soon(reader.readexactly(4)) == b"echo"


async def test_a_lost_connection_leaves_no_cycle_of_objects(
    port: Port, authority: Authority
) -> None:
    with uncollected():
        async with client(port, authority.client()) as (reader, writer):
            writer.write(b"echo")
            await soon(reader.readexactly(4))
            peer = port.peers.pop()
            writer.transport.abort()
            await soon(peer.lost.wait())
            await settle()
            gone = weakref.ref(peer)
            del peer
            assert gone() is None
