"""Under which paths do OpenAI's clients find what: the list of models, and the endpoints."""

from collections.abc import Awaitable, Callable

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.dataplane import DataPlane
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.openai.answers import OpenAiDoor
from gateway.frontends.http.openai.listing import cards
from gateway.frontends.http.openai.models import ServedModels
from gateway.frontends.http.openai.paths import V1, paths_of
from gateway.frontends.http.openai.request_id import request_id_header
from gateway.openai_exchange import Endpoint
from gateway.resumption.recordings import Recordings
from gateway.settings import HttpSettings

Answer = Callable[[Request], Awaitable[Response]]

BODY = {"requestBody": {"content": {JSON: {"schema": {"type": "object"}}}, "required": True}}


class OpenAiRoutes:
    """The endpoints, and what `/v1/models` tells of those who serve them."""

    def __init__(
        self, dataplane: DataPlane, settings: HttpSettings, recordings: Recordings | None = None
    ) -> None:
        self._models = ServedModels(dataplane)
        self._door = OpenAiDoor(dataplane, settings, recordings or Recordings())
        self._answers = {endpoint: self._answer_of(endpoint) for endpoint in Endpoint}

    def routes(self) -> list[Route]:
        """The plain routes, without FastAPI's per-request models."""
        return [
            Route(path, answer, methods=["POST"])
            for endpoint, answer in self._answers.items()
            for path in paths_of(endpoint)
        ]

    def router(self) -> APIRouter:
        """The list of models, and for the page at /docs the plain routes, which come before it."""
        router = APIRouter()
        for prefix in V1:
            shown = prefix == V1[0]
            router.add_api_route(
                f"{prefix}/models", self.models, response_class=Response, include_in_schema=shown
            )
            router.add_api_route(
                f"{prefix}/models/{{model:path}}",
                self.model,
                response_class=Response,
                include_in_schema=shown,
            )
        for endpoint, answer in self._answers.items():
            router.add_api_route(
                paths_of(endpoint)[0],
                answer,
                methods=["POST"],
                response_class=Response,
                name=endpoint,
                description="The body goes to the model that it names, and its answer comes back.",
                openapi_extra=BODY,
            )
        return router

    async def models(self, request: Request) -> Response:
        """The models that the other endpoints know."""
        return _json(request, {"object": "list", "data": cards(self._models)})

    async def model(self, request: Request, model: str) -> Response:
        """One of them."""
        for card in cards(self._models):
            if card["id"] == model:
                return _json(request, card)
        raise self._models.why_not(model)

    def _answer_of(self, endpoint: Endpoint) -> Answer:
        async def answer(request: Request) -> Response:
            return await self._door.answer(request, endpoint)

        return answer


def _json(request: Request, found: object) -> Response:
    return Response(orjson.dumps(found), headers=request_id_header(request), media_type=JSON)
