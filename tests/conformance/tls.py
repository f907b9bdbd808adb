"""Servers over TLS, as the tests of both wires start and ask them."""

import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import httpx
from tritonclient.grpc import service_pb2_grpc

from tests.certificates import Authority, Certificate
from tests.serving import WAIT_SECS, Serving


def flags(wire: str, own: Certificate, root: str = "") -> Sequence[str]:
    """The options of a wire over TLS, mutual with an authority of clients."""
    kind = "mutual" if root else ""
    asked = f"--{wire}-use-ssl{'-' if kind else ''}{kind}=true"
    files = (f"--{wire}-server-cert={own.cert}", f"--{wire}-server-key={own.key}")
    return (asked, *files, *((f"--{wire}-root-cert={root}",) if root else ()))


def https(server: Serving, port: str = "http") -> str:
    """The base URL of a port."""
    return f"https://127.0.0.1:{server.ports[port]}"


def metric(server: Serving, context: ssl.SSLContext, name: str) -> float:
    """A sample of the metrics page, which is over TLS as HTTP."""
    page = httpx.get(f"{https(server, 'metrics')}/metrics", verify=context, timeout=WAIT_SECS)
    lines = [each for each in page.text.splitlines() if each.startswith(f"{name} ")]
    return float(lines[0].rpartition(" ")[2])


@contextmanager
def session(
    server: Serving, context: ssl.SSLContext, port: str = "http"
) -> Iterator[ssl.SSLSocket]:
    """A session with a port."""
    address = ("127.0.0.1", server.ports[port])
    with (
        socket.create_connection(address, WAIT_SECS) as wire,
        context.wrap_socket(wire, server_hostname="localhost") as found,
    ):
        yield found


@contextmanager
def stub(server: Serving, authority: Authority, mine: Certificate | None = None) -> Iterator[Any]:
    """The service over gRPC, for a client with or without a certificate."""
    credentials = grpc.ssl_channel_credentials(
        authority.root.read_bytes(),
        None if mine is None else mine.key.read_bytes(),
        None if mine is None else mine.cert.read_bytes(),
    )
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(server.grpc, credentials, options=options) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)
