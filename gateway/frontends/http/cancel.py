"""Cancelling one request by its id, over HTTP."""

from fastapi import APIRouter, Request, Response

from gateway.dataplane import DataPlane
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.paths import MODEL, VERSION, version_of
from gateway.running_requests import RequestName

CANCEL = "/requests/{request_id:path}/cancel"
"""An id may have slashes."""


class CancelRoutes:
    """`POST /v2/models/{model}[/versions/{version}]/requests/{id}/cancel`."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    def router(self) -> APIRouter:
        """The routes, as FastAPI documents them at /docs."""
        router = APIRouter()
        for path in (MODEL, VERSION):
            router.add_api_route(
                f"{path}{CANCEL}", self.cancel, methods=["POST"], response_class=Response
            )
        return router

    async def cancel(self, request: Request, model: str, request_id: str) -> Response:
        """Stop every request of that id on that model; 404 if none runs."""
        self._dataplane.cancel(RequestName(model, version_of(request), request_id))
        return Response(b"{}", media_type=JSON)
