"""URLs of key sets: https, or http on this machine."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from gateway.policy.caller import is_this_machine

PORTS = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True)
class KeySetUrl:
    """A URL; `target` has its path and query, `shown` is the URL without its query.

    A query may have a secret, so it is not shown.
    """

    is_secure: bool
    host: str
    port: int
    target: str = field(repr=False)
    shown: str

    def __str__(self) -> str:
        return self.shown

    @property
    def authority(self) -> str:
        """The value of `Host`, without the usual port (RFC 9110, 7.2 and 4.2.3)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = PORTS["https" if self.is_secure else "http"]
        return host if self.port == usual else f"{host}:{self.port}"


def is_url(text: str) -> bool:
    """Whether a text is a URL, and not the path of a file."""
    return "://" in text


def read_url(text: str) -> KeySetUrl:
    """The parts of a URL; ValueError if it cannot be used."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # as the resolver does
    except ValueError as error:
        raise ValueError(f"it is no URL: {error}") from None
    shown = f"{parts.scheme}://{parts.netloc}{parts.path}"
    if not text.isascii() or not text.isprintable() or " " in text or not host:
        raise ValueError("it is no URL, expected https://HOST/PATH in ASCII characters")
    if parts.scheme not in PORTS:
        raise ValueError(f"its scheme is '{parts.scheme}', expected https")
    if "@" in parts.netloc:
        raise ValueError("it has a user or a password, expected none: a key set is public")
    if parts.scheme == "http" and not is_this_machine(host):
        raise ValueError(f"its scheme is http and its host '{host}', expected https")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return KeySetUrl(parts.scheme == "https", host, port or PORTS[parts.scheme], target, shown)
