"""The playground: one page at `/`, its files, and the state of the server that it shows."""

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
    # Kept, but asked for every time: a new release is seen at once, and costs one empty answer.
    "Cache-Control": "no-cache",
}
"""No page frames this one, and nothing on it comes from elsewhere or is written into its text."""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file; `etag` says what it holds."""

    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        """The file, or 304 for a browser that has it already."""
        headers = {**HEADERS, "ETag": self.etag}
        if _names(request.headers.get("if-none-match", ""), self.etag):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def read_assets() -> dict[str, Asset]:
    """Every file of the package's own, by its name."""
    folder = files(__package__).joinpath("assets")
    return {each.name: _asset(each.name, each.read_bytes()) for each in folder.iterdir()}


def _asset(name: str, content: bytes) -> Asset:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return Asset(content, MEDIA_TYPES[name.rpartition(".")[2]], etag)


def _names(given: str, etag: str) -> bool:
    """Whether a list of entity tags has this one (RFC 9110, 13.1.2)."""
    return any(each.strip().removeprefix("W/") in (etag, "*") for each in given.split(","))


class PlaygroundRoutes:
    """`GET /`, `/playground/state` and `/playground/{file}`.

    What the page does beyond looking it does by the same requests as every other client.
    """

    def __init__(self, dataplane: DataPlane, settings: Settings) -> None:
        self._state = ServerState(dataplane, settings)
        self._assets = read_assets()

    def routes(self) -> list[Route]:
        """The plain routes."""
        return [
            Route("/", self.page, methods=["GET"]),
            Route("/playground/state", self.state, methods=["GET"]),
            Route("/playground/{name}", self.asset, methods=["GET"]),
        ]

    async def page(self, request: Request) -> Response:
        """The page itself."""
        return self._assets[PAGE].response(request)

    async def asset(self, request: Request) -> Response:
        """A style, a script or a picture of the page; 404 for any other name."""
        asset = self._assets.get(request.path_params["name"])
        if asset is None:
            raise HTTPException(404)
        return asset.response(request)

    async def state(self, request: Request) -> Response:
        """The server as it is now; nobody may keep it."""
        state = await self._state.read()
        headers = {"Cache-Control": "no-store"}
        return Response(orjson.dumps(state), headers=headers, media_type=JSON)
