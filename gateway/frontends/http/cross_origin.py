"""Responses that pages of other origins may read (Fetch, 3.2: CORS protocol)."""

from collections.abc import Awaitable, Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from gateway.admission.quotas import LIMIT_HEADERS
from gateway.frontends.http.body import HEADER_LENGTH
from gateway.frontends.http.request_scope import (
    REPLAYED,
    SEND_WHOLE,
    STREAM,
    BeginningApp,
    RequestState,
    has_origin,
)

METHODS = ("GET", "HEAD", "POST")
EXPOSED = (
    *("X-Request-Id", "Retry-After", HEADER_LENGTH.decode(), STREAM, REPLAYED),
    *("Retry-After-Ms", "X-Should-Retry", "X-Refused-Reason", "X-Predicted-Wait-Ms"),
    *LIMIT_HEADERS,
)
"""Headers of responses that a page's script may read, with those that each one may."""


class CrossOriginApp:
    """An application whose responses pages of some origins may read, `*` for all.

    It answers preflights itself: a browser sends no key with them. A page sends any header, since
    browsers add no credentials. Requests without `Origin` have the way of `app`, and those with it
    are begun by none.
    """

    def __init__(self, app: BeginningApp, origins: Collection[str]) -> None:
        self._app = app
        self._shared = CORSMiddleware(
            self._answer,
            allow_origins=origins,
            allow_methods=METHODS,
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=EXPOSED,
        )
        self.begin = app.begin
        """See `Begin`."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        app = self._shared if has_origin(scope) else self._app
        return app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by messages of ASGI, to whose heads the middleware adds its headers."""
        state: RequestState = scope.get("state", {})
        state.pop(SEND_WHOLE, None)
        # The middleware reads `Origin` from its own list, which a stream of events would clear.
        scope["headers"] = list(scope["headers"])
        await self._app(scope, receive, send)
