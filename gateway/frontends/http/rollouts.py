"""Routes of rollouts: their states, their histories, and changes."""

from importlib import import_module
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.dataplane import DataPlane
from gateway.frontends.http.audit import note_change
from gateway.frontends.http.body import decoded, read_body
from gateway.frontends.http.documentation import DocumentedRoute
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.json_object import parse_optional_object
from gateway.frontends.http.request_scope import LAST_EVENT_ID, MODEL, caller_in
from gateway.rollouts.changes import RolloutAction
from gateway.rollouts.requests import change_rollout
from gateway.settings import HttpSettings
from gateway.threads import apart

ROLLOUTS = "/v2/rollouts"
ROLLOUT = f"{MODEL}/rollout"


class RolloutRoutes:
    """`/v2/rollouts`, `/v2/rollouts/events` and `/v2/models/{model}/rollout`."""

    def __init__(self, dataplane: DataPlane, settings: HttpSettings) -> None:
        self._dataplane = dataplane
        self._rollouts = dataplane.rollouts
        self._max_input_size = settings.max_input_size

    def routes(self) -> list[DocumentedRoute]:
        """The routes."""
        return [
            DocumentedRoute("GET", ROLLOUTS, self.rollouts),
            DocumentedRoute("GET", f"{ROLLOUTS}/events", self.events),
            DocumentedRoute("GET", ROLLOUT, self.rollout),
            DocumentedRoute("GET", f"{ROLLOUT}/history", self.history),
            DocumentedRoute("POST", f"{ROLLOUT}/start", self.start),
            DocumentedRoute("POST", f"{ROLLOUT}/pause", self.pause),
            DocumentedRoute("POST", f"{ROLLOUT}/resume", self.resume),
            DocumentedRoute("POST", f"{ROLLOUT}/promote", self.promote),
            DocumentedRoute("POST", f"{ROLLOUT}/abort", self.abort),
            DocumentedRoute("POST", f"{ROLLOUT}/weight", self.weight),
        ]

    async def rollouts(self, request: Request) -> Response:
        """The latest rollout of each model that has had one."""
        return _json(self._rollouts.describe_all())

    async def events(self, request: Request) -> Response:
        """Changes of rollouts and of live versions, as server-sent events.

        After a connection is lost, `Last-Event-ID` continues the stream.
        """
        library = await apart(lambda: import_module("gateway.frontends.http.rollout_events"))
        last_id = request.headers.get(LAST_EVENT_ID, "")
        found = self._rollouts.events.read(last_id, caller_in(request.scope))
        response: Response = library.RolloutEventsResponse(found)
        return response

    async def rollout(self, request: Request) -> Response:
        """The latest rollout of a model: state, step, weight, and the values of its guardrails."""
        return _json(self._rollouts.describe(request.path_params["model"]))

    async def history(self, request: Request) -> Response:
        """The transitions of a model's rollouts, oldest first."""
        return _json(self._rollouts.history(request.path_params["model"]))

    async def start(self, request: Request) -> Response:
        """Begin a rollout of a `version`. Members of `rollout.json` replace those of the file."""
        return await self._change(request, RolloutAction.START)

    async def pause(self, request: Request) -> Response:
        """Keep the present weight until `resume`."""
        return await self._change(request, RolloutAction.PAUSE)

    async def resume(self, request: Request) -> Response:
        """Continue a paused rollout."""
        return await self._change(request, RolloutAction.RESUME)

    async def promote(self, request: Request) -> Response:
        """Make the candidate stable now."""
        return await self._change(request, RolloutAction.PROMOTE)

    async def abort(self, request: Request) -> Response:
        """Return every request to stable now."""
        return await self._change(request, RolloutAction.ABORT)

    async def weight(self, request: Request) -> Response:
        """Set the candidate's percentage of the requests, `weight`, and pause."""
        return await self._change(request, RolloutAction.WEIGHT)

    async def _change(self, request: Request, action: RolloutAction) -> Response:
        """Change a rollout; the answer is its new state."""
        body = await read_body(request, self._max_input_size)
        threads = self._dataplane.threads
        members = await decoded(threads, request.scope, parse_optional_object, body)
        note_change(request.scope, members)
        name, by = request.path_params["model"], _sender(request)
        return _json(await change_rollout(self._rollouts, name, action, members, by))


def _sender(request: Request) -> str:
    # uvicorn has no address of a client that has reset its connection.
    return f"api:{request.client.host}" if request.client else "api"


def _json(found: Any) -> Response:
    return Response(msgspec.json.encode(found), media_type=JSON)
