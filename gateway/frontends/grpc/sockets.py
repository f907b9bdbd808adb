"""Listening sockets of a transport (TCP or Unix), and the names of its clients."""

import os
import socket
from typing import Any

from gateway.settings import UNIX, GrpcSettings, netloc
from gateway.tls.certificates import ALPN
from gateway.unix_socket import listening_socket, unix_path

EVERY_ADDRESS = "::"
"""Every address of IPv6 and IPv4."""

MAPPED = "::ffff:"
"""Prefix of an IPv4 address on an IPv6 socket."""


def bound(settings: GrpcSettings) -> socket.socket:
    """A listening socket; OSError with the address and the reason if binding fails.

    A stale Unix socket, without a listener, is replaced.
    """
    path = unix_path(settings.address)
    return listening_socket(path, settings.socket_mode) if path else _tcp(settings)


def require_free(settings: GrpcSettings) -> None:
    """Raise the OSError of `bound` for an unusable address, which gRPC would only log."""
    bound(settings).close()
    path = unix_path(settings.address)
    if path:
        os.unlink(path)


def _tcp(settings: GrpcSettings) -> socket.socket:
    address, port = settings.address, settings.port
    try:
        return socket.create_server(
            (address, port),
            family=socket.AF_INET6 if ":" in address else socket.AF_INET,
            reuse_port=settings.reuse_port,
            dualstack_ipv6=address == EVERY_ADDRESS and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        # Python appends the address to the reason.
        why = (error.strerror or str(error)).partition(" (while")[0]
        raise OSError(f"cannot listen on {netloc(address, port)}: {why}") from None


def speaks_http_2(session: Any) -> bool:
    """Whether a TLS session has agreed on HTTP/2, as gRPC requires; true without TLS."""
    return session is None or session.selected_alpn_protocol() == ALPN["grpc"]


def peer_name(name: tuple[str, int] | None, listening_at: str) -> str:
    """The client's address in gRPC's notation; "" for one that has reset its connection."""
    if unix_path(listening_at):
        return UNIX
    if name is None:
        return ""
    host, port = name[0].removeprefix(MAPPED), name[1]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
