"""Handles of models: requests, readiness, metadata and statistics for a program."""

from typing import Any, Unpack

from gateway import server_info
from gateway.config import pbtxt
from gateway.dataplane import DataPlane
from gateway.in_process.handle import ServerHandle
from gateway.in_process.request import RequestFields, draft
from gateway.in_process.responses import AsyncResponses, LocalRequest, PostedRequest, Responses


class ModelHandle:
    """One model of the repository in one version, or in the highest version that serves.

    The model is looked up at each use, so a handle stays valid after a reload; an unknown model
    raises NOT_FOUND then. `state` and `reason` are those of the index at `Server.models`.
    """

    def __init__(
        self, handle: ServerHandle, name: str, version: str = "", state: str = "", reason: str = ""
    ) -> None:
        self._handle = handle
        self.name = name
        self.version = version
        self.state = state
        self.reason = reason

    def __repr__(self) -> str:
        return f"ModelHandle(name={self.name!r}, version={self.version!r}, state={self.state!r})"

    def infer(self, **fields: Unpack[RequestFields]) -> Responses:
        """Send a request, in any thread but that of the server's own event loop.

        Requests of one thread are submitted in the order of the calls. An invalid request raises
        InferenceError here or at the first response.
        """
        self._handle.refuse_here("async_infer")
        return Responses(self._handle, draft(self.name, self.version, fields))

    def async_infer(self, **fields: Unpack[RequestFields]) -> AsyncResponses:
        """Send a request, in a task of any event loop; otherwise as `infer`."""
        asked = draft(self.name, self.version, fields)
        source: LocalRequest | PostedRequest
        if self._handle.here:
            source = LocalRequest(self._handle, asked)
        else:
            source = PostedRequest(self._handle, asked)
        return AsyncResponses(self._handle, source, asked.request.id)

    def ready(self) -> bool:
        """Whether the model can serve and its readiness check passes; False for unknown models.

        On the server's own loop the check of the model is skipped: use `async_ready` there.
        """
        if self._handle.here:
            return self._handle.look(lambda: server_info.model_ready(self._dataplane, *self._id))
        return self._handle.ask(self._check_ready, "async_ready")

    async def async_ready(self) -> bool:
        """As `ready`."""
        return await self._handle.async_ask(self._check_ready)

    def metadata(self) -> dict[str, Any]:
        """Versions, inputs and outputs, in the form of the v2 protocol."""
        return self._handle.look(lambda: server_info.model_metadata(self._dataplane, *self._id))

    def config(self) -> dict[str, Any]:
        """The completed configuration, in the JSON form of the v2 protocol."""
        return self._handle.look(lambda: pbtxt.to_json(self._dataplane.model(*self._id).config))

    def statistics(self) -> dict[str, Any]:
        """`model_stats` of the ready versions, in the form of the v2 protocol."""

        rows = self._handle.look(lambda: server_info.statistics(self._dataplane, *self._id))
        return {"model_stats": rows}

    async def _check_ready(self) -> bool:
        return await server_info.check_model_ready(self._dataplane, *self._id)

    @property
    def _id(self) -> tuple[str, str]:
        return self.name, self.version

    @property
    def _dataplane(self) -> DataPlane:
        return self._handle.server_loop.server.dataplane
