"""Identities of clients by their certificates, which the authority of the server has signed."""

from collections.abc import Iterable, Sequence
from typing import Any

URI, DNS, CN = "URI:", "DNS:", "CN:"
KINDS = (URI, DNS, CN)
"""The kinds of names that identify a certificate; the first kind that a certificate has counts."""


def identity(uris: Sequence[str], names: Sequence[str], common_names: Sequence[str]) -> str:
    """The name of a certificate: its first URI, else its first DNS name, else its first CN.

    It has its kind in front, since a CN may have any text. A DNS name is in lower case. "" for a
    certificate without such a name.
    """
    for kind, found in zip(KINDS, (uris, names, common_names), strict=True):
        if first := next(filter(None, found), ""):
            return normal(kind + first)
    return ""


def normal(name: str) -> str:
    """The one spelling of a name with its kind: DNS names have no case (RFC 4343)."""
    return DNS + name.removeprefix(DNS).lower() if name.startswith(DNS) else name


def identity_of(session: Any) -> str:
    """The identity of the client of a TLS session (an `ssl.SSLObject`), which has verified it.

    It is "" for a certificate whose names are no text.
    """
    try:
        found = session.getpeercert()
    except ValueError:
        return ""
    alternatives: Iterable[tuple[str, str]] = found.get("subjectAltName", ())
    subject = (pair for part in found.get("subject", ()) for pair in part)
    return identity(
        [value for kind, value in alternatives if kind == "URI"],
        [value for kind, value in alternatives if kind == "DNS"],
        [value for kind, value in subject if kind == "commonName"],
    )
