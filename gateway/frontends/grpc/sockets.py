"""Listening sockets (TCP or Unix) and TLS certificates of a transport."""

import os
import re
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gateway.settings import UNIX, GrpcSettings, GrpcTlsSettings, netloc

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


CERT_FLAG, KEY_FLAG, ROOT_FLAG = "--grpc-server-cert", "--grpc-server-key", "--grpc-root-cert"
HTTP_2 = "h2"

CERTIFICATE = re.compile(rb"-----BEGIN (?:TRUSTED )?CERTIFICATE-----")
PRIVATE_KEY = re.compile(rb"-----BEGIN (?:\w+ )?PRIVATE KEY-----")
ENCRYPTED = re.compile(rb"-----BEGIN ENCRYPTED PRIVATE KEY-----|^Proc-Type: 4,ENCRYPTED", re.M)


@dataclass(frozen=True, slots=True)
class Certificates:
    """A checked certificate, its key and the client authority in PEM; `root` may be empty."""

    cert: bytes
    key: bytes
    root: bytes
    context: ssl.SSLContext
    """TLS 1.2 or later, with ALPN `h2`."""


def read_certificates(settings: GrpcTlsSettings) -> Certificates:
    """Read and check the files; OSError with the flag, the file, the fault and the fix."""
    cert = _read(CERT_FLAG, settings.cert)
    key = _read(KEY_FLAG, settings.key)
    root = _read(ROOT_FLAG, settings.root) if settings.root else b""
    _require(CERT_FLAG, settings.cert, CERTIFICATE.search(cert), "certificate")
    if ENCRYPTED.search(key):
        _fail(KEY_FLAG, settings.key, "is encrypted; decrypt it: openssl pkey -in KEY -out PLAIN")
    _require(KEY_FLAG, settings.key, PRIVATE_KEY.search(key), "private key")
    if settings.root:
        _require(ROOT_FLAG, settings.root, CERTIFICATE.search(root), "certificate")
    return Certificates(cert, key, root, _context(settings, root))


def _context(settings: GrpcTlsSettings, root: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([HTTP_2])
    _load_chain(context, settings)
    if root:
        _load_root(context, settings.root, root)
    if settings.mutual:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_chain(context: ssl.SSLContext, settings: GrpcTlsSettings) -> None:
    try:
        context.load_cert_chain(settings.cert, settings.key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            _fail(
                KEY_FLAG,
                settings.key,
                f"is not the key of the certificate in {CERT_FLAG} '{settings.cert}'; "
                "give the two that were made together",
            )
        _fail(
            CERT_FLAG,
            settings.cert,
            f"and {KEY_FLAG} '{settings.key}' cannot be used: {error.reason or error}",
        )


def _load_root(context: ssl.SSLContext, path: str, root: bytes) -> None:
    try:
        context.load_verify_locations(cadata=root.decode("ascii", "replace"))
    except ssl.SSLError as error:
        _fail(ROOT_FLAG, path, f"cannot be used: {error.reason or error}")


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        _fail(flag, path, f"cannot be read: {error.strerror}")


def _require(flag: str, path: str, found: object, what: str) -> None:
    if not found:
        _fail(flag, path, f"holds no {what} in PEM form (-----BEGIN ...)")


def _fail(flag: str, path: str, why: str) -> NoReturn:
    raise OSError(f"{flag} '{path}' {why}")


def speaks_http_2(session: Any) -> bool:
    """Whether a TLS session has agreed on HTTP/2, as gRPC requires; true without TLS."""
    return session is None or session.selected_alpn_protocol() == HTTP_2


def peer_name(name: tuple[str, int] | None, listening_at: str) -> str:
    """The client's address in gRPC's notation; "" for one that has reset its connection."""
    if unix_path(listening_at):
        return UNIX
    if name is None:
        return ""
    host, port = name[0].removeprefix(MAPPED), name[1]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
