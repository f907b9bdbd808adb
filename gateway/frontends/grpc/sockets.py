"""Listening sockets of a transport (TCP or Unix), and the names of its clients."""

import os
import socket
import stat
from typing import Any

from gateway.settings import UNIX, GrpcSettings, netloc
from gateway.tls.certificates import ALPN

EVERY_ADDRESS = "::"
"""Every address of IPv6 and IPv4."""

MAPPED = "::ffff:"
"""Prefix of an IPv4 address on an IPv6 socket."""


def unix_path(address: str) -> str:
    """The path in an address such as `unix:/run/sluice`; "" for TCP."""
    return address.removeprefix(UNIX) if address.startswith(UNIX) else ""


def bound(settings: GrpcSettings) -> socket.socket:
    """A listening socket; OSError with the address and the reason if binding fails.

    A stale Unix socket, without a listener, is replaced.
    """
    path = unix_path(settings.address)
    if path:
        _clear(path)
        return _unix(path)
    return _tcp(settings)


def require_free(settings: GrpcSettings) -> None:
    """Raise the OSError of `bound` for an unusable address, which gRPC would only log."""
    bound(settings).close()
    path = unix_path(settings.address)
    if path:
        os.unlink(path)


class SocketFile:
    """A Unix socket in the file system, identified by its inode."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._identity = _identity(path)

    def remove(self) -> None:
        """Remove the socket, unless another one has replaced it."""
        try:
            if _identity(self._path) == self._identity:
                os.unlink(self._path)
        except FileNotFoundError:
            return


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


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


def _unix(path: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    try:
        found.bind(path)
        found.listen()
    except OSError as error:
        found.close()
        raise _refused(path, error.strerror or str(error)) from None
    return found


def _clear(path: str) -> None:
    """Remove the stale socket of a server that did not shut down."""
    try:
        kind = os.lstat(path).st_mode
    except OSError:
        return  # binding reports the error, if any
    if not stat.S_ISSOCK(kind):
        raise _refused(path, "the path exists and is not a socket; remove it")
    if _is_served(path):
        raise _refused(path, "Address already in use")
    os.unlink(path)


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            return True  # the backlog of a listener is full
    return True


def _refused(path: str, why: str) -> OSError:
    return OSError(f"cannot listen on {UNIX}{path}: {why}")


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
