"""Certificates that a test makes, by the command line of OpenSSL."""

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

NAMES = "DNS:localhost,IP:127.0.0.1,IP:::1"
LEAF = "basicConstraints=critical,CA:FALSE"
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

    def issue(self, name: str, names: str = NAMES) -> Certificate:
        """A new certificate with a CN and subject alternative names, by default this machine's.

        "" is no name of that kind.
        """
        found = self._files(name or "unnamed")
        signed = ("-x509", "-CA", str(self.root), "-CAkey", str(self._key), "-addext", LEAF)
        more = ("-addext", f"subjectAltName={names}") if names else ()
        _request(found.cert, found.key, name, *signed, *more)
        return found

    def issue_expired(self, name: str) -> Certificate:
        """A certificate that has expired a day ago."""
        found = self._files(name)
        request = found.cert.with_suffix(".csr")
        _request(request, found.key, name)
        signed = ("-CA", str(self.root), "-CAkey", str(self._key), "-days", "-1")
        _openssl("x509", "-req", "-in", str(request), *signed, "-out", str(found.cert))
        return found

    def client(self, certificate: Certificate | None = None) -> ssl.SSLContext:
        """The context of a client that trusts this authority."""
        found = ssl.create_default_context(cafile=str(self.root))
        if certificate is not None:
            found.load_cert_chain(certificate.cert, certificate.key)
        return found

    def _files(self, name: str) -> Certificate:
        file = name.replace("/", "-").replace("\\", "")
        return Certificate(self._folder / f"{file}.pem", self._folder / f"{file}.key")


def replace_files(old: Certificate, new: Certificate) -> None:
    """Replace the files of a certificate by those of another one, each at once."""
    for source, target in ((new.cert, old.cert), (new.key, old.key)):
        copy = target.with_suffix(".copy")
        copy.write_bytes(source.read_bytes())
        copy.replace(target)


def encrypted(key: Path) -> Path:
    """The same key, behind a pass phrase."""
    found = key.with_suffix(".encrypted")
    _openssl("pkey", "-in", str(key), "-out", str(found), "-aes256", "-passout", "pass:secret")
    return found


def _request(cert: Path, key: Path, name: str, *more: str) -> None:
    paths = ("-out", str(cert), "-keyout", str(key))
    subject = f"/CN={name}" if name else "/"
    days = ("-days", "2") if "-x509" in more else ()
    _openssl("req", *KEY, *paths, *days, "-subj", subject, *more)


def _openssl(*arguments: str) -> None:
    subprocess.run(("openssl", *arguments), check=True, capture_output=True, timeout=30)
