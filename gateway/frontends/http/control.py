"""Health, metadata, configuration and statistics over HTTP."""

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request, Response

from gateway import metadata
from gateway.config import pbtxt
from gateway.dataplane import DataPlane
from gateway.frontends.http.errors import JSON, plain_error
from gateway.frontends.http.paths import MODEL, VERSION, version_of


async def _version(request: Request) -> str:
    return version_of(request)


Version = Annotated[str, Depends(_version)]


class ControlRoutes:
    """The management routes of the v2 protocol."""

    def __init__(self, dataplane: DataPlane, server_id: str) -> None:
        self._dataplane = dataplane
        self._server_id = server_id

    def router(self) -> APIRouter:
        """The routes, as FastAPI documents them at /docs."""
        router = APIRouter()
        for path, endpoint in self._endpoints():
            router.add_api_route(path, endpoint, methods=["GET"], response_class=Response)
        return router

    def _endpoints(self) -> list[tuple[str, Any]]:
        return [
            ("/v2/health/live", self.live),
            ("/v2/health/ready", self.ready),
            ("/v2", self.server),
            ("/v2/models/stats", self.all_statistics),
            (f"{MODEL}/ready", self.model_ready),
            (f"{VERSION}/ready", self.model_ready),
            (f"{MODEL}/config", self.config),
            (f"{VERSION}/config", self.config),
            (f"{MODEL}/stats", self.statistics),
            (f"{VERSION}/stats", self.statistics),
            (MODEL, self.metadata),
            (VERSION, self.metadata),
        ]

    async def live(self) -> Response:
        """Whether the process serves requests at all."""
        if self._dataplane.exiting:
            return plain_error(503, "Server exiting")
        return Response()

    async def ready(self) -> Response:
        """Whether every model that should be served is ready; 400 while not, as Triton."""
        if self._dataplane.exiting:
            return plain_error(503, "Server exiting")
        return Response(status_code=200 if await self._dataplane.check_ready() else 400)

    async def server(self) -> Response:
        """Name, version and extensions of the server."""
        return _json(metadata.server_metadata(self._server_id))

    async def metadata(self, model: str, version: Version) -> Response:
        """Inputs, outputs and ready versions of a model."""
        return _json(metadata.model_metadata(self._dataplane, model, version))

    async def model_ready(self, model: str, version: Version) -> Response:
        """200 if the model serves requests, else 404 or 503 with the reason."""
        found = self._dataplane.model(model, version)
        if not found.ready:
            return plain_error(503, f"model '{model}' is unavailable: {found.trouble}")
        await found.check_ready()
        return Response()

    async def config(self, model: str, version: Version) -> Response:
        """The model's configuration as it is in force."""
        return _json(pbtxt.to_json(self._dataplane.model(model, version).config))

    async def statistics(self, model: str, version: Version) -> Response:
        """Statistics of the model's ready versions."""
        rows = metadata.statistics(self._dataplane, model, version)
        return _json({"model_stats": rows})

    async def all_statistics(self) -> Response:
        """Statistics of every ready version of every model."""
        return _json({"model_stats": metadata.statistics(self._dataplane, "", "")})


def _json(found: Any) -> Response:
    return Response(orjson.dumps(found), media_type=JSON)
