"""The playground: one page at `/`, its files, and the state of the server that it shows."""

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.dataplane import DataPlane
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.playground.assets import PAGE, read_assets
from gateway.frontends.http.playground.state import ServerState
from gateway.settings import Settings


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
