"""The routes by which clients of `vllm serve` ask for its health, version and load."""

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from gateway import __version__
from gateway.dataplane import DataPlane
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.openai.served import serves
from gateway.openai_contract import Endpoint

READY, NOT_READY = 200, 503


class ServerStateRoutes:
    """`/health`, `/ping`, `/version` and `/load`, with the bodies and statuses of vLLM's server."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    def router(self) -> APIRouter:
        """The routes, as FastAPI documents them at /docs."""
        router = APIRouter()
        for path, endpoint, method in (
            ("/health", self.health, "GET"),
            ("/ping", self.health, "GET"),
            ("/ping", self.health, "POST"),
            ("/version", self.version, "GET"),
            ("/load", self.load, "GET"),
        ):
            router.add_api_route(path, endpoint, methods=[method], response_class=Response)
        return router

    async def health(self) -> Response:
        """200 if the server is ready, as by `/v2/health/ready`, else 503; the body is empty."""
        ready = not self._dataplane.exiting and await self._dataplane.check_ready()
        return Response(status_code=READY if ready else NOT_READY)

    async def version(self) -> Response:
        """The version of this server."""
        return _json({"version": __version__})

    async def load(self) -> Response:
        """How many requests are in flight on the models that serve OpenAI's endpoints."""
        counted = [
            model.in_flight
            for model in self._dataplane.models()
            if any(serves(model.config, endpoint) for endpoint in Endpoint)
        ]
        return _json({"server_load": sum(counted)})


def _json(found: object) -> Response:
    return Response(orjson.dumps(found), media_type=JSON)
