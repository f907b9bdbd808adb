"""Certificates that a test makes, by the command line of OpenSSL."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key, in PEM files."""

    cert: Path
    key: Path


class Authority:
    """An authority that signs certificates: for this machine, and for its clients."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.root = folder / "root.pem"
        self._key = folder / "root.key"
        _request(self.root, self._key, "authority", "-x509", "-addext", "keyUsage=keyCertSign")

    def issue(self, name: str) -> Certificate:
        """A new certificate with the names of this machine."""
        found = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        signed = ("-x509", "-CA", str(self.root), "-CAkey", str(self._key))
        plain = ("-addext", "basicConstraints=critical,CA:FALSE", "-addext", NAMES)
        _request(found.cert, found.key, name, *signed, *plain)
        return found


def encrypted(key: Path) -> Path:
    """The same key, behind a pass phrase."""
    found = key.with_suffix(".encrypted")
    _openssl("pkey", "-in", str(key), "-out", str(found), "-aes256", "-passout", "pass:secret")
    return found


def _request(cert: Path, key: Path, name: str, *more: str) -> None:
    paths = ("-out", str(cert), "-keyout", str(key))
    _openssl("req", *KEY, *paths, "-days", "2", "-subj", f"/CN={name}", *more)


def _openssl(*arguments: str) -> None:
    subprocess.run(("openssl", *arguments), check=True, capture_output=True, timeout=30)
