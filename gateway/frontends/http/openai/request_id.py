"""Which id has a request? The client's own, or one that is made for it."""

import uuid
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

HEADER = "X-Request-Id"
KEY = "sluice.request_id"
"""Where a request's scope has its id, once somebody has asked for it."""


def request_id(request: Request) -> str:
    """The id that the client gave in a header, or else one that is like no other."""
    found: str | None = request.scope.get(KEY)
    if found is None:
        found = request.scope[KEY] = request.headers.get(HEADER) or uuid.uuid4().hex
    return found


def own_id(request: Request, members: Mapping[str, Any]) -> str:
    """The id of a request whose body has these members: the header's, the body's, or a made one.

    An answer's header has only the first and the last, for a text may not fit into a header.
    """
    named = members.get("request_id")
    if HEADER in request.headers or not (isinstance(named, str) and named):
        return request_id(request)
    return named


def request_id_header(request: Request) -> dict[str, str]:
    """The header that every answer has."""
    return {HEADER: request_id(request)}
