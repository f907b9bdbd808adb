"""The end of a port with TLS: handshakes that have not ended."""

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.frontends.grpc.hyper_transport import HyperTransport
from gateway.settings import GrpcSettings, TlsSettings
from gateway.tls import connection as connection_module
from tests.builders import settle, soon
from tests.certificates import Authority


async def test_a_stop_drops_handshakes_that_have_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HANDSHAKE_SECS", 1000.0)
    own = Authority(tmp_path / "authority").issue("server")
    tls = TlsSettings(wire="grpc", cert=str(own.cert), key=str(own.key))
    transport = HyperTransport({}, GrpcSettings(address="127.0.0.1", port=0, tls=tls))
    await transport.start()
    with socket.create_connection(("127.0.0.1", transport.port)) as client:
        client.setblocking(False)
        await settle()
        await soon(transport.stop())
        await soon(transport.cut_off(0))
        with suppress(ConnectionResetError):
            assert await soon(asyncio.get_running_loop().sock_recv(client, 1)) == b""
