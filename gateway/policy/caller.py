"""The caller of a request, by its address and its headers."""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from time import time
from urllib.parse import unquote

Headers = Iterable[tuple[str, str]]
"""Pairs of a lower-case name and a value. The `:authority` of HTTP/2 is a `host`."""

UNIX = "unix:"
IP = ("ipv4", "ipv6")
LOCALHOST = "localhost"
FORWARDED = re.compile(
    r"forwarded|via|x-(original-)?forwarded-.*|x-real-ip|x-client-ip|x-cluster-client-ip"
    r"|x-envoy-external-address|cf-connecting-ip|true-client-ip|fly-client-ip"
)
"""Headers that proxies add: behind one on this machine, clients of others have its address."""

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:@/?#\[\]]+)(:[0-9]*)?")
"""A `Host` in lower case, with an optional port (RFC 9110, 7.2)."""
OWN_SITES = ("same-origin", "none")
"""The values of Sec-Fetch-Site for a page of this server, and for a user without a page."""
SHOWN_CHARS = 64


@dataclass(slots=True)
class Caller:
    """The sender of a request.

    It is `local` if it is on this machine, and no page of another origin. `foreign` is the header
    of such a page, "" for none. `tenant` and `roles` (values of `Role`) are those of its API key,
    token or listed certificate, empty without; `key_id` is that of its API key, or the name of its
    certificate, "" for a token. It is `valid` until the credential is revoked, or soon after it
    `expires`, in seconds of the Unix epoch. `models` matches the names of the models that exist for
    it; None matches all.
    """

    local: bool = False
    foreign: str = ""
    tenant: str = ""
    key_id: str = ""
    roles: frozenset[str] = frozenset()
    valid: bool = True
    models: re.Pattern[str] | None = None
    expires: float = math.inf

    def remains_permitted(self, roles: frozenset[str]) -> bool:
        """Whether its credential is still valid, and it has one of the roles."""
        has_expired = self.expires != math.inf and self.expires <= time()
        return self.valid and not has_expired and not roles.isdisjoint(self.roles)

    def sees(self, model: str) -> bool:
        """Whether a model exists for it."""
        return self.models is None or self.models.fullmatch(model) is not None


def sees(caller: Caller | None, model: str) -> bool:
    """Whether a model exists for a caller; all do on a server without API keys."""
    return caller is None or caller.sees(model)


def tenant_of(caller: Caller | None) -> str:
    """The tenant of a caller; "" on a server without API keys and tokens."""
    return "" if caller is None else caller.tenant


def caller_of(address: str, headers: Headers, hosts: Collection[str]) -> Caller:
    """The caller at an address; `unix:` is a Unix socket, "" an unknown address.

    A local one names this machine or one of `hosts` as its host, if it names a host: a page may
    reach this machine by a name of its own (DNS rebinding). No page reaches a Unix socket, and the
    host of its clients may be its path.
    """
    found = list(headers)
    named = _values(found, "host")
    foreign = foreign_page(found)
    local = (
        not foreign
        and is_this_machine(address)
        and not any(FORWARDED.fullmatch(name) for name, _ in found)
        and (address.startswith(UNIX) or all(_is_known(host, hosts) for host in named))
    )
    return Caller(local, foreign)


def address_of(peer: str) -> str:
    """The address in a peer of gRPC's notation, such as `ipv6:%5B::1%5D:4000`; "" for others."""
    if peer.startswith(UNIX):
        return UNIX
    kind, _, rest = peer.partition(":")
    return unquote(rest).rpartition(":")[0].strip("[]") if kind in IP else ""


def is_this_machine(address: str) -> bool:
    """Whether an address is of the loopback interface, its name, or of a Unix socket."""
    if address == LOCALHOST or address.startswith(UNIX):
        return True
    found = _ip(address)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return found is not None and (mapped or found).is_loopback


def _ip(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def read_hosts(texts: Iterable[str]) -> frozenset[str]:
    """The hosts in lists with commas, in lower case; ValueError for one that is no host."""
    return frozenset(_host(each.strip()) for text in texts for each in text.lower().split(","))


def _host(text: str) -> str:
    name = _name(text) if _ip(text) is None else text
    if not name or name != text.strip("[]"):
        raise ValueError(f"'{text}': expected the name or the address of a host, without port")
    return name


def _is_known(host: str, hosts: Collection[str]) -> bool:
    name = _name(host)
    return is_this_machine(name) or name in hosts


def _name(host: str) -> str:
    """The host without its port; "" if it is malformed."""
    found = HOST.fullmatch(host)
    return found[1].strip("[]") if found else ""


def foreign_page(headers: Sequence[tuple[str, str]]) -> str:
    """The header by which a browser marks a request of another origin's page, "" if none does."""
    hosts = set(_values(headers, "host"))
    for name, value in headers:
        if name == "origin" and {value.lower().partition("://")[2]} != hosts:
            return f"Origin '{shown(value)}'"
    for name, value in headers:
        if name == "sec-fetch-site" and value not in OWN_SITES:
            return f"Sec-Fetch-Site '{shown(value)}'"
    return ""


def renamed_host(
    address: str, port: int, headers: Sequence[tuple[str, str]], hosts: Collection[str]
) -> str:
    """The `Host` of a page that reached this machine by a name of its own, "" if none did.

    The page has bound its name to a loopback address (DNS rebinding), so its origin is `http://`
    with that name and the port of the listener. An address, one of `hosts`, a name without a dot
    and one below `localhost` (RFC 6761, 6.3) are no names of other sites.
    """
    named, origins = set(_values(headers, "host")), set(_values(headers, "origin"))
    host = next(iter(named), "")
    if not is_this_machine(address) or len(named) != 1 or origins != {f"http://{host}"}:
        return ""
    found = HOST.fullmatch(host)
    if found is None or (found[2] or ":80").lstrip(":") != str(port):
        return ""
    name = found[1].strip("[]").rstrip(".")
    is_own = _ip(name) is not None or name in hosts or name.endswith(f".{LOCALHOST}")
    return "" if is_own or "." not in name else shown(host)


def _values(headers: Sequence[tuple[str, str]], wanted: str) -> Sequence[str]:
    """The values of a header, in lower case."""
    return [value.lower() for name, value in headers if name == wanted]


def shown(value: str, most: int = SHOWN_CHARS) -> str:
    """The first characters of a client's text; those that are not printable ASCII are `?`."""
    plain = (each if each.isascii() and each.isprintable() else "?" for each in value)
    return "".join(plain)[:most]
