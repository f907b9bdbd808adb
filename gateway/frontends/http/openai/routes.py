"""Routes of OpenAI's endpoints, of the list of models, and of `vllm serve`'s server state."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import __version__
from gateway.dataplane import DataPlane
from gateway.errors import InferenceError, unexpected
from gateway.frontends.http.documentation import DocumentedRoute
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.guard import Guard
from gateway.frontends.http.openai.answers import Answer, OpenAiAnswers, openai_refused
from gateway.frontends.http.openai.request import ServedModels, request_id_header, serves
from gateway.frontends.http.request_scope import has_origin
from gateway.models.model import Model
from gateway.openai_contract import Endpoint
from gateway.resumption.recordings import Recordings
from gateway.settings import HttpSettings

log = logging.getLogger("sluice.http")

OPERATION = {
    "description": "The body goes to the model that it names; the answer is the model's.",
    "requestBody": {"content": {JSON: {"schema": {"type": "object"}}}, "required": True},
}
"""The documentation of every endpoint (OpenAPI: operation object)."""

V1 = ("/v1", "/openai/v1")
"""The second prefix is KServe's."""

BARE = (Endpoint.TOKENIZE, Endpoint.DETOKENIZE)
"""vLLM has these without the prefix."""

BOTH = (Endpoint.SCORE, Endpoint.RERANK)
"""vLLM has these with and without the prefix."""

BARE_PATHS = frozenset(f"/{each}" for each in (*BARE, *BOTH))

READY, NOT_READY = 200, 503

OWNER = "sluice"
LENGTH = "max_model_len"
"""The config parameter with the maximum number of tokens of prompt and answer together."""


class OpenAiRoutes:
    """The endpoints, and `/v1/models`."""

    def __init__(
        self, dataplane: DataPlane, settings: HttpSettings, recordings: Recordings | None = None
    ) -> None:
        self._models = ServedModels(dataplane)
        answers = OpenAiAnswers(dataplane, settings, recordings or Recordings())
        self._answers = {endpoint: answers.of(endpoint) for endpoint in Endpoint}

    def routes(self) -> list[DocumentedRoute]:
        """The routes; each is documented once, under its first path."""
        models = [
            DocumentedRoute("GET", f"{prefix}/models{rest}", endpoint, shown=prefix == V1[0])
            for prefix in V1
            for rest, endpoint in (("", self.models), ("/{model:path}", self.model))
        ]
        return models + [
            DocumentedRoute(
                "POST", path, answer, name=endpoint, shown=number == 0, operation=OPERATION
            )
            for endpoint, answer in self._answers.items()
            for number, path in enumerate(paths_of(endpoint))
        ]

    def in_front_of(self, app: ASGIApp, guard: Guard | None = None) -> ASGIApp:
        """The endpoints, and `app` for all other requests, and for those that `guard` refuses.

        A request to an endpoint passes neither the application's middleware nor its table of
        routes; together they take as long as several tokens. Those of pages have further
        conditions, which stand there.
        """
        answers = {path: self._answers[each] for each in Endpoint for path in paths_of(each)}

        def may_pass(scope: Scope) -> bool:
            return guard is None or guard.allows(scope)

        async def route(scope: Scope, receive: Receive, send: Send) -> None:
            is_post = scope["type"] == "http" and scope["method"] == "POST"
            answer = answers.get(scope["path"]) if is_post else None
            if answer is not None and not has_origin(scope) and may_pass(scope):
                response = await _answered(answer, Request(scope, receive, send))
                await response(scope, receive, send)
            else:
                await app(scope, receive, send)

        return route

    async def models(self, request: Request) -> Response:
        """The models that serve the other endpoints."""
        return _json(request, {"object": "list", "data": cards(self._models.of(request.scope))})

    async def model(self, request: Request) -> Response:
        """One of these models."""
        model: str = request.path_params["model"]
        models = self._models.of(request.scope)
        for card in cards(models):
            if card["id"] == model:
                return _json(request, card)
        if (found := models.labelled(model)) is not None:
            return _json(request, _card(found, model, found.name))
        raise models.why_not(model)


async def _answered(answer: Answer, request: Request) -> Response:
    try:
        return await answer(request)
    except InferenceError as error:
        return openai_refused(request, error)
    except Exception:
        # Around one request in a frontend: only the log has the traceback.
        log.exception("request failed unexpectedly")
        return openai_refused(request, unexpected())


def cards(models: Iterable[Model]) -> Sequence[dict[str, Any]]:
    """A card for each name: the model's own, then further ones that no model has as its own."""
    listed = list(models)
    own = {model.name for model in listed}
    return [card for model in listed for card in _cards_of(model, own)]


def _cards_of(model: Model, taken: set[str]) -> Iterator[dict[str, Any]]:
    yield _card(model, model.name, None)
    for name in model.further_names:
        if name not in taken:
            yield _card(model, name, model.name)


def _card(model: Model, name: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(model.loaded_at),
        "owned_by": OWNER,
        "root": model.name,
        "parent": parent,
        "max_model_len": _length(model),
    }


def _length(model: Model) -> int | None:
    """The length by the runtime, or else by the config."""
    told = model.config.parameter(LENGTH)
    configured = int(told) if told.isdecimal() else None
    return configured if model.max_model_len is None else model.max_model_len


def _json(request: Request, found: object) -> Response:
    return Response(orjson.dumps(found), headers=request_id_header(request), media_type=JSON)


class ServerStateRoutes:
    """`/health`, `/ping`, `/version` and `/load`, with the bodies and statuses of vLLM's server."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    def routes(self) -> list[DocumentedRoute]:
        """The routes."""
        return [
            DocumentedRoute("GET", "/health", self.health),
            DocumentedRoute("GET", "/ping", self.health),
            DocumentedRoute("POST", "/ping", self.health),
            DocumentedRoute("GET", "/version", self.version),
            DocumentedRoute("GET", "/load", self.load),
        ]

    async def health(self, request: Request) -> Response:
        """200 if the server is ready, as by `/v2/health/ready`, else 503; the body is empty."""
        ready = not self._dataplane.exiting and await self._dataplane.check_ready()
        return Response(status_code=READY if ready else NOT_READY)

    async def version(self, request: Request) -> Response:
        """The version of this server."""
        return _plain_json({"version": __version__})

    async def load(self, request: Request) -> Response:
        """The number of requests in flight on the models that serve OpenAI's endpoints."""
        counted = [
            len(model.requests)
            for model in self._dataplane.models()
            if any(serves(model.config, endpoint) for endpoint in Endpoint)
        ]
        return _plain_json({"server_load": sum(counted)})


def _plain_json(found: object) -> Response:
    return Response(orjson.dumps(found), media_type=JSON)


def paths_of(endpoint: Endpoint) -> Sequence[str]:
    """The paths of an endpoint, the documented one first."""
    bare = f"/{endpoint}"
    if endpoint in BARE:
        return (bare,)
    versioned = [f"{prefix}/{endpoint}" for prefix in V1]
    return [*versioned, bare] if endpoint in BOTH else versioned


def is_openai(path: str) -> bool:
    """Whether requests for a path get answers and errors in OpenAI's form."""
    return path.startswith(tuple(f"{prefix}/" for prefix in V1)) or path in BARE_PATHS
