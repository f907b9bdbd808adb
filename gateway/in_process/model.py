"""A model as a program sees it: what it is, and how it is asked."""

from typing import Any, Unpack

from gateway import server_info
from gateway.config import pbtxt
from gateway.dataplane import DataPlane
from gateway.in_process.async_responses import AsyncResponses
from gateway.in_process.handle import Link
from gateway.in_process.request import RequestFields, draft
from gateway.in_process.responses import Responses
from gateway.in_process.sources import LocalSource, RemoteSource, Source


class Model:
    """One name of the repository, and a version or the highest one that serves.

    It is looked up with each use, so that it outlives reloads; NOT_FOUND is raised then. `state`
    and `reason` are what `Server.models` found.
    """

    def __init__(
        self, link: Link, name: str, version: str = "", state: str = "", reason: str = ""
    ) -> None:
        self._link = link
        self.name = name
        self.version = version
        self.state = state
        self.reason = reason

    def __repr__(self) -> str:
        return f"Model(name={self.name!r}, version={self.version!r}, state={self.state!r})"

    def infer(self, **fields: Unpack[RequestFields]) -> Responses:
        """Send a request, in any thread but that of the server's own event loop.

        Requests of one thread are submitted in the order of the calls. What is wrong with a request
        is raised as InferenceError here or with the first response.
        """
        self._link.refuse_here("async_infer")
        return Responses(self._link, draft(self.name, self.version, fields))

    def async_infer(self, **fields: Unpack[RequestFields]) -> AsyncResponses:
        """Send a request, in a task of any event loop; the same promises as of `infer`."""
        asked = draft(self.name, self.version, fields)
        source: Source
        if self._link.here:
            source = LocalSource(self._link, asked)
        else:
            source = RemoteSource(self._link, asked)
        return AsyncResponses(self._link, source, asked.request.id)

    def ready(self) -> bool:
        """Whether it can serve, and says so itself; False for what is not known.

        On the server's own loop nothing can be asked of the model: that is `async_ready`.
        """
        if self._link.here:
            return self._link.look(lambda: server_info.model_ready(self._dataplane, *self._id))
        return self._link.ask(self._check_ready, "async_ready")

    async def async_ready(self) -> bool:
        """As `ready`."""
        return await self._link.async_ask(self._check_ready)

    def metadata(self) -> dict[str, Any]:
        """Its versions, inputs and outputs, as the v2 protocol has them."""
        return self._link.look(lambda: server_info.model_metadata(self._dataplane, *self._id))

    def config(self) -> dict[str, Any]:
        """Its configuration as it is in force, in the JSON form of the v2 protocol."""
        return self._link.look(lambda: pbtxt.to_json(self._dataplane.model(*self._id).config))

    def statistics(self) -> dict[str, Any]:
        """`model_stats` of its ready versions, as the v2 protocol has them."""
        rows = self._link.look(lambda: server_info.statistics(self._dataplane, *self._id))
        return {"model_stats": rows}

    async def _check_ready(self) -> bool:
        return await server_info.check_model_ready(self._dataplane, *self._id)

    @property
    def _id(self) -> tuple[str, str]:
        return self.name, self.version

    @property
    def _dataplane(self) -> DataPlane:
        return self._link.home.server.dataplane
