"""Which id has a request? The client's own, or one that is made for it."""

import uuid

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


def request_id_header(request: Request) -> dict[str, str]:
    """The header that every answer has."""
    return {HEADER: request_id(request)}
