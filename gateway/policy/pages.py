"""Rules for pages in browsers: origins that may read responses, types of the bodies they send."""

import re
from collections.abc import Collection, Iterable, Sequence

from gateway.policy.caller import foreign_page, renamed_host, shown

ANY_ORIGIN = "*"
ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
"""An origin as browsers send it (RFC 6454, 6.2): in lower case, names of hosts in ASCII."""
DEFAULT_PORTS = {"http": ":80", "https": ":443"}

JSON = "application/json"
BINARY = "application/octet-stream"
"""The type of JSON with binary data behind it (binary tensor data extension)."""


def read_origins(texts: Iterable[str], *, with_keys: bool) -> frozenset[str]:
    """The origins of an option, as browsers send them; ValueError for one that is no origin.

    ANY_ORIGIN is refused on a server with API keys or tokens.
    """
    found = frozenset(_origin(each) for each in texts)
    if with_keys and ANY_ORIGIN in found:
        raise ValueError(
            f"'{ANY_ORIGIN}' lets every page on the web use an API key or token that it gets hold "
            "of; with --api-keys or --jwt-jwks name each origin, as in https://app.example"
        )
    return found


def _origin(text: str) -> str:
    if text == ANY_ORIGIN:
        return text
    found = ORIGIN.fullmatch(text.lower())
    if found is None:
        raise ValueError(
            f"'{text}': expected SCHEME://HOST[:PORT] without a path, as in https://app.example, "
            f"or {ANY_ORIGIN}"
        )
    # Browsers leave the default port out.
    return found[0].removesuffix(DEFAULT_PORTS.get(found["scheme"], "\0"))


def unfit_type(headers: Sequence[tuple[str, str]], types: Collection[str]) -> str | None:
    """The refusal of a body that another origin's page sends, if it has none of some types.

    A browser asks before it sends such a type to another origin, and not before it sends another
    one, or none (Fetch, 2.2.2: CORS-safelisted request-header).
    """
    page = foreign_page(headers)
    found = [value for name, value in headers if name == "content-type"]
    if not page or (found and all(_is_one_of(types, each) for each in found)):
        return None
    given = f"'{shown(', '.join(found))}'" if found else "none"
    expected = " or ".join(sorted(types))
    return (
        f"expected the content-type {expected} from a page of another origin, found {given}; {page}"
    )


def _is_one_of(types: Collection[str], content_type: str) -> bool:
    essence = content_type.partition(";")[0].strip().lower()
    return essence in types or (JSON in types and essence.endswith("+json"))


def unknown_name(
    address: str, port: int, headers: Sequence[tuple[str, str]], hosts: Collection[str]
) -> str | None:
    """The refusal of a page that reached this machine by a name of its own; see `renamed_host`."""
    host = renamed_host(address, port, headers, hosts)
    if not host:
        return None
    return (
        f"pages of this machine are answered under its own names, found Host '{host}'; "
        "--allowed-hosts adds a name"
    )
