"""Options of TLS, the same for HTTP and gRPC."""

import argparse

from gateway.errors import Code, InferenceError
from gateway.flags.values import add_truth
from gateway.settings import TlsSettings

PEM_FILES = {
    "server-cert": "certificate chain of the server",
    "server-key": "private key of the server's certificate",
    "root-cert": "authorities of clients' certificates",
}
"""The options with files of a wire, without the name of the wire."""


def add_flags(group: "argparse._ArgumentGroup", wire: str) -> None:
    """Add the options of a protocol: http or grpc."""
    add_truth(group, f"--{wire}-use-ssl", False, "serve over TLS")
    add_truth(
        group,
        f"--{wire}-use-ssl-mutual",
        False,
        "serve over TLS, only to clients with a certificate",
    )
    add_files(group, wire)


def add_files(group: "argparse._ArgumentGroup", wire: str) -> None:
    """Add the options with the files of a wire."""
    for name, text in PEM_FILES.items():
        group.add_argument(
            f"--{wire}-{name}", default="", metavar="PEM", help=f"{text} (default: none)"
        )


def tls_settings(flags: argparse.Namespace, wire: str) -> TlsSettings | None:
    """Settings from the parsed options; INVALID_ARG for an incomplete set of files."""
    given = vars(flags)
    mutual = given[f"{wire}_use_ssl_mutual"]
    if not (given[f"{wire}_use_ssl"] or mutual):
        return None
    found = TlsSettings(
        wire=wire,
        cert=given[f"{wire}_server_cert"],
        key=given[f"{wire}_server_key"],
        root=given[f"{wire}_root_cert"],
        mutual=mutual,
    )
    asked = f"--{wire}-use-ssl-mutual" if mutual else f"--{wire}-use-ssl"
    _require_pem(asked, f"--{wire}-server-cert", found.cert)
    _require_pem(asked, f"--{wire}-server-key", found.key)
    if mutual:
        _require_pem(asked, f"--{wire}-root-cert", found.root)
    return found


def mutual_settings(flags: argparse.Namespace, wire: str) -> TlsSettings | None:
    """Settings of a wire whose ends always show certificates; None without any of its files."""
    names = {name: f"--{wire}-{name}" for name in PEM_FILES}
    found = {name: vars(flags)[f"{wire}_{name.replace('-', '_')}"] for name in PEM_FILES}
    given = next((names[name] for name, path in found.items() if path), None)
    if given is None:
        return None
    for name, path in found.items():
        _require_pem(given, names[name], path)
    cert, key, root = found.values()
    return TlsSettings(wire=wire, cert=cert, key=key, root=root, mutual=True)


def _require_pem(asked: str, flag: str, path: str) -> None:
    if not path:
        raise InferenceError(
            Code.INVALID_ARG, f"{asked} needs {flag}, the path of a PEM file; none is given"
        )
