"""Routes that /docs shows, and the pages with them, which FastAPI renders at the first request."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from gateway import __version__
from gateway.threads import IMPORTING, apart

PAGES = (
    "/docs",
    "/docs/oauth2-redirect",
    "/redoc",
    "/openapi.json",
    "/static-offline-docs/{path:path}",
)
"""Paths of FastAPI's pages."""

Endpoint = Callable[[Request], Awaitable[Response]]
NOTHING: Mapping[str, Any] = {}


class DocumentedRoute(Route):
    """A route for one method, without HEAD for GET.

    The name and the docstring of the endpoint are its summary and description at /docs. `operation`
    are further members of OpenAPI's operation object.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Endpoint,
        *,
        name: str | None = None,
        shown: bool = True,
        operation: Mapping[str, Any] = NOTHING,
    ) -> None:
        super().__init__(path, endpoint, name=name, include_in_schema=shown)
        self.methods = {method}
        self.operation = operation


Tagged = Mapping[str, Sequence[DocumentedRoute]]
"""The routes under each heading of /docs."""


class Documentation:
    """`/docs`, `/redoc` and `/openapi.json`, which load nothing from other servers.

    The import of FastAPI takes 15 MiB and half a second, and few clients ask for these pages.
    """

    def __init__(self, tagged: Tagged, exception_handlers: Mapping[Any, ExceptionHandler]) -> None:
        self._tagged = tagged
        self._exception_handlers = exception_handlers
        self._app: ASGIApp | None = None
        self._building = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Starlette routes of the pages, not shown there."""
        return [Route(path, self) for path in PAGES]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._building:
            if self._app is None:
                self._app = await apart(self._build)
        await self._app(scope, receive, send)

    def _build(self) -> ASGIApp:
        with IMPORTING:
            library = import_module("fastapi_offline")
            # Static files need anyio's backend, which anyio imports at its first call.
            anyio = import_module("anyio")
            anyio.run(anyio.sleep, 0)
        app = library.FastAPIOffline(
            title="Sluice",
            version=__version__,
            redirect_slashes=False,
            exception_handlers=self._exception_handlers,
        )
        for tag, routes in self._tagged.items():
            for route in routes:
                app.add_api_route(
                    route.path,
                    route.endpoint,
                    methods=route.methods,
                    name=route.name,
                    tags=[tag],
                    response_class=Response,
                    include_in_schema=route.include_in_schema,
                    openapi_extra={"parameters": list(_parameters(route)), **route.operation},
                )
        app.openapi()  # kept by FastAPI
        built: ASGIApp = app
        return built


def _parameters(route: Route) -> Iterator[Mapping[str, Any]]:
    """The parameters in the path (OpenAPI: parameter object)."""
    for name in route.param_convertors:
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
