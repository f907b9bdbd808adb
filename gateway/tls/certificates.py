"""Certificates of a port: PEM files, their checks, and the same again after a change."""

import asyncio
import logging
import re
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gateway.policy.watched_file import LOOK_SECS, ReloadFailures, WatchedFile
from gateway.settings import TlsSettings

ALPN = {"http": "http/1.1", "grpc": "h2", "fleet": "sluice"}
"""The protocol of the port of a wire (RFC 7301)."""

CERTIFICATE = re.compile(rb"-----BEGIN (?:TRUSTED )?CERTIFICATE-----")
PRIVATE_KEY = re.compile(rb"-----BEGIN (?:\w+ )?PRIVATE KEY-----")
ENCRYPTED = re.compile(rb"-----BEGIN ENCRYPTED PRIVATE KEY-----|^Proc-Type: 4,ENCRYPTED", re.M)

log = logging.getLogger("sluice.server")


@dataclass(frozen=True, slots=True)
class PemFiles:
    """A checked certificate, its key and the client authority in PEM; `root` may be empty."""

    cert: bytes
    key: bytes
    root: bytes
    context: ssl.SSLContext
    """TLS 1.2 or later, with the protocol of the port."""


class Certificates:
    """The certificates of one port.

    OSError with the option, the file, the fault and the fix if they cannot be used at first; later
    ones that cannot be used change nothing.
    """

    def __init__(self, settings: TlsSettings) -> None:
        self.settings = settings
        paths = [Path(each) for each in (settings.cert, settings.key, settings.root) if each]
        failures = ReloadFailures("certificates refused", **{"for": settings.wire})
        self._watched = WatchedFile(paths, lambda: read_certificates(settings), failures)

    @property
    def files(self) -> PemFiles:
        """The files that new connections get."""
        return self._watched.value

    @property
    def context(self) -> ssl.SSLContext:
        """The context of a new connection. A changed one is new: one in use cannot forget."""
        return self.files.context

    @property
    def failures(self) -> ReloadFailures:
        """The failures of reading the files again."""
        return self._watched.failures

    async def follow(self) -> None:
        """Read the files again within LOOK_SECS and the time of reading, whenever one changes."""
        about = {"for": self.settings.wire, "file": self.settings.cert}
        while True:
            await asyncio.sleep(LOOK_SECS)
            try:
                if await self._watched.look():
                    log.info("certificates read", extra=about)
            except Exception as error:  # noqa: BLE001 - the next round tries again
                self.failures.note(error)


def read_certificates(settings: TlsSettings) -> PemFiles:
    """Read and check the files; OSError with the option, the file, the fault and the fix."""
    cert_flag, key_flag, root_flag = _flags(settings)
    cert = _read(cert_flag, settings.cert)
    key = _read(key_flag, settings.key)
    root = _read(root_flag, settings.root) if settings.root else b""
    _require(cert_flag, settings.cert, CERTIFICATE.search(cert), "certificate")
    if ENCRYPTED.search(key):
        _fail(key_flag, settings.key, "is encrypted; decrypt it: openssl pkey -in KEY -out PLAIN")
    _require(key_flag, settings.key, PRIVATE_KEY.search(key), "private key")
    if settings.root:
        _require(root_flag, settings.root, CERTIFICATE.search(root), "certificate")
    return PemFiles(cert, key, root, _context(settings, root))


def _flags(settings: TlsSettings) -> tuple[str, str, str]:
    """The options that name the certificate, the key and the authorities."""
    wire = settings.wire
    return f"--{wire}-server-cert", f"--{wire}-server-key", f"--{wire}-root-cert"


def client_context(settings: TlsSettings) -> ssl.SSLContext:
    """The context of a client of a port with the same authority; OSError as `read_certificates`.

    The name of the port is not checked: its certificate is one of that authority.
    """
    root = read_certificates(settings).root
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    return _filled(context, settings, root)


def _context(settings: TlsSettings, root: bytes) -> ssl.SSLContext:
    return _filled(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), settings, root)


def _filled(context: ssl.SSLContext, settings: TlsSettings, root: bytes) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([ALPN[settings.wire]])
    _load_chain(context, settings)
    if root:
        _load_root(context, settings, root)
    if settings.mutual:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_chain(context: ssl.SSLContext, settings: TlsSettings) -> None:
    cert_flag, key_flag, _ = _flags(settings)
    try:
        # The password is for a key that was encrypted a moment ago: no prompt asks for one.
        context.load_cert_chain(settings.cert, settings.key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            _fail(
                key_flag,
                settings.key,
                f"is not the key of the certificate in {cert_flag} '{settings.cert}'; "
                "give the two that were made together",
            )
        _fail(
            cert_flag,
            settings.cert,
            f"and {key_flag} '{settings.key}' cannot be used: {error.reason or error}",
        )


def _load_root(context: ssl.SSLContext, settings: TlsSettings, root: bytes) -> None:
    try:
        context.load_verify_locations(cadata=root.decode("ascii", "replace"))
    except ssl.SSLError as error:
        flag = _flags(settings)[2]
        _fail(flag, settings.root, f"cannot be used: {error.reason or error}")


def _read(flag: str, path: str) -> bytes:
    try:
        if stat.S_ISFIFO(Path(path).stat().st_mode):
            _fail(flag, path, "is a pipe, expected a file: it is read again after a change")
        return Path(path).read_bytes()
    except OSError as error:
        if error.strerror is None:
            raise
        _fail(flag, path, f"cannot be read: {error.strerror}")


def _require(flag: str, path: str, found: object, what: str) -> None:
    if not found:
        _fail(flag, path, f"holds no {what} in PEM form (-----BEGIN ...)")


def _fail(flag: str, path: str, why: str) -> NoReturn:
    raise OSError(f"{flag} '{path}' {why}")
