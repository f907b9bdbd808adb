"""The head of an HTTP request on its way from a frontend process: a scope of ASGI as JSON."""

from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from gateway.frontends.http.asgi_extensions import HEADER_NAMES
from gateway.processes.messages import byte_pairs, text_pairs

AS_IS = ("http_version", "method", "scheme", "path", "root_path", "client", "server")
AS_TEXT = ("raw_path", "query_string")


def written_scope(scope: Scope, *, whole: bool) -> Mapping[str, Any]:
    """The head as JSON; `whole` says that the piece of the body that goes with it is all of it."""
    found = {name: scope[name] for name in AS_IS}
    found |= {name: scope[name].decode("latin-1") for name in AS_TEXT}
    found["headers"] = text_pairs(scope["headers"])
    found["names"] = [name.decode("latin-1") for name in scope["state"][HEADER_NAMES]]
    found["whole"] = whole
    return found


def read_scope(head: Mapping[str, Any], state: dict[str, Any]) -> Scope:
    """The scope again, with another `state`; the names as the client wrote them are added to it."""
    found: dict[str, Any] = {name: head[name] for name in AS_IS}
    found |= {name: head[name].encode("latin-1") for name in AS_TEXT}
    for address in ("client", "server"):
        found[address] = None if found[address] is None else tuple(found[address])
    names = [name.encode("latin-1") for name in head["names"]]
    return found | {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "headers": byte_pairs(head["headers"]),
        "state": {**state, HEADER_NAMES: names},
    }
