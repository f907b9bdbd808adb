"""Connections over TLS whose server has ended its output, and still reads."""

import asyncio
import socket
import ssl

import pytest

from tests.builders import soon
from tests.certificates import Authority, Certificate
from tests.gateway.tls.peers import LARGE, Peer, Port, serving, until


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("last", [b"last", 3 * LARGE], ids=["small", "large"])
async def test_the_output_ends_with_a_notice_and_the_input_does_not(
    server: Certificate, authority: Authority, version: ssl.TLSVersion, last: bytes
) -> None:
    """Without `close_notify` the end would be an error to the client, which sends meanwhile."""
    context = authority.client()
    context.minimum_version = context.maximum_version = version

    def ask(port: int) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", port), 5) as plain,
            context.wrap_socket(
                plain, server_hostname="localhost", suppress_ragged_eofs=False
            ) as session,
        ):
            session.sendall(b"begin")
            answer = b""
            while data := session.recv(1 << 16):
                answer += data
                if answer == data:
                    session.sendall(LARGE)
            session.sendall(b"end")
            return answer

    async with serving(Port(server, "")) as port:
        asking = asyncio.create_task(asyncio.to_thread(ask, port.port))
        await until(lambda: port.peers and port.peer.received)
        first, second = port.peer, Peer()
        first.transport.write(last)
        first.transport.write_eof()
        first.transport.set_protocol(second)
        assert not first.transport.is_closing()
        assert await soon(asking) == last
        await soon(second.lost.wait())
        assert (first.received, second.received) == (b"begin", LARGE + b"end")
        first.lost.set()
