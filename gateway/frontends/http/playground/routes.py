"""Routes of the playground: the page at `/`, its files, and the server's state."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.dataplane import DataPlane
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.playground.state import ServerState
from gateway.settings import Settings

PAGE = "index.html"
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Cached but revalidated, so that a new release takes effect at once.
    "Cache-Control": "no-cache",
}
"""Headers of all files: no framing, no other origins, no inline scripts or styles."""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file; its `etag` is a hash of the content."""

    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        """The file, or 304 for a browser that has it."""
        headers = {**HEADERS, "ETag": self.etag}
        if _names(request.headers.get("if-none-match", ""), self.etag):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def read_assets() -> dict[str, Asset]:
    """The files of the page, by name."""
    folder = files(__package__).joinpath("assets")
    return {each.name: _asset(each.name, each.read_bytes()) for each in folder.iterdir()}


def _asset(name: str, content: bytes) -> Asset:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return Asset(content, MEDIA_TYPES[name.rpartition(".")[2]], etag)


def _names(given: str, etag: str) -> bool:
    """Whether a list of entity tags contains this one (RFC 9110, 13.1.2)."""
    return any(each.strip().removeprefix("W/") in (etag, "*") for each in given.split(","))


class PlaygroundRoutes:
    """`GET /`, `/playground/state` and `/playground/{file}`.

    For all other actions the page sends the same requests as any client.
    """

    def __init__(self, dataplane: DataPlane, settings: Settings) -> None:
        self._state = ServerState(dataplane, settings)
        self._assets = read_assets()

    def routes(self) -> list[Route]:
        """Starlette routes, not shown at /docs."""
        return [
            Route("/", self.page, methods=["GET"]),
            Route("/playground/state", self.state, methods=["GET"]),
            Route("/playground/{name}", self.asset, methods=["GET"]),
        ]

    async def page(self, request: Request) -> Response:
        """The page."""
        return self._assets[PAGE].response(request)

    async def asset(self, request: Request) -> Response:
        """A style, script or icon of the page; 404 for other names."""
        asset = self._assets.get(request.path_params["name"])
        if asset is None:
            raise HTTPException(404)
        return asset.response(request)

    async def state(self, request: Request) -> Response:
        """The state of the server, not to be cached."""
        state = await self._state.read()
        headers = {"Cache-Control": "no-store"}
        return Response(orjson.dumps(state), headers=headers, media_type=JSON)
