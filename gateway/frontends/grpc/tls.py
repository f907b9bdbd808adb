"""What a server shows of itself over TLS, and whom it lets in: PEM files, read and checked."""

import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gateway.settings import GrpcTlsSettings

CERT_FLAG, KEY_FLAG, ROOT_FLAG = "--grpc-server-cert", "--grpc-server-key", "--grpc-root-cert"
HTTP_2 = "h2"

CERTIFICATE = re.compile(rb"-----BEGIN (?:TRUSTED )?CERTIFICATE-----")
PRIVATE_KEY = re.compile(rb"-----BEGIN (?:\w+ )?PRIVATE KEY-----")
ENCRYPTED = re.compile(rb"-----BEGIN ENCRYPTED PRIVATE KEY-----|^Proc-Type: 4,ENCRYPTED", re.M)


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files that fit together, in PEM form. `root` is empty if no authority was named."""

    cert: bytes
    key: bytes
    root: bytes
    context: ssl.SSLContext
    """Serves by them, HTTP/2 only."""


def read_certificates(settings: GrpcTlsSettings) -> Certificates:
    """Read the files; OSError that names the flag, what was found and the fix."""
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
