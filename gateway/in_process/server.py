"""The server inside a program or a test, and its models: no sockets, numpy arrays in and out."""

import asyncio
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, Unpack

from gateway import metadata
from gateway.config import pbtxt
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.in_process.options import read_override, read_settings
from gateway.in_process.request import RequestFields, draft
from gateway.in_process.responses import AsyncResponses, LocalRequest, PostedRequest, Responses
from gateway.in_process.server_loop import LoopThread, ServerHandle, ServerLoop
from gateway.models.model_folder import read_versions
from gateway.models.repository_control import LOAD, PROGRAM, UNLOAD, audited


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
            return self._handle.look(lambda: metadata.model_ready(self._dataplane, *self._id))
        return self._handle.ask(self._check_ready, "async_ready")

    async def async_ready(self) -> bool:
        """As `ready`."""
        return await self._handle.async_ask(self._check_ready)

    def metadata(self) -> dict[str, Any]:
        """Versions, inputs and outputs, in the form of the v2 protocol."""
        return self._handle.look(lambda: metadata.model_metadata(self._dataplane, *self._id))

    def config(self) -> dict[str, Any]:
        """The completed configuration, in the JSON form of the v2 protocol."""
        return self._handle.look(lambda: pbtxt.to_json(self._dataplane.model(*self._id).config))

    def statistics(self) -> dict[str, Any]:
        """`model_stats` of the ready versions, in the form of the v2 protocol."""

        rows = self._handle.look(lambda: metadata.statistics(self._dataplane, *self._id))
        return {"model_stats": rows}

    async def _check_ready(self) -> bool:
        return await metadata.check_model_ready(self._dataplane, *self._id)

    @property
    def _id(self) -> tuple[str, str]:
        return self.name, self.version

    @property
    def _dataplane(self) -> DataPlane:
        return self._handle.server_loop.server.dataplane


class Server:
    """A server with the options of `sluice serve` as keywords, `_` for `-`.

    `with`, or `start` and `stop`, run it in a thread of its own; `async with`, or `async_start`
    and `async_stop`, run it on the event loop of the program. All methods are safe in any thread.
    On the server's own loop a blocking method raises INVALID_ARG, which names its `async_` form.
    Every failure is an InferenceError with its code.
    """

    def __init__(self, **options: Any) -> None:
        self._settings = read_settings(options)
        self._lock = threading.Lock()
        self._handle: ServerHandle | None = None
        self._thread: LoopThread | None = None
        self._task: asyncio.Task[None] | None = None

    # Start and stop.

    def start(self, *, timeout: float | None = None) -> Self:
        """Start in a thread of its own; returns once the start-up models are loaded.

        Raises InferenceError if a model failed (unless `exit_on_error=False`), UNAVAILABLE after
        `timeout` seconds, INVALID_ARG if the server runs already. After an error it does not run.
        """
        with self._lock:
            self._refuse_started()
            self._thread = LoopThread(self._settings)
            self._handle = ServerHandle(self._thread.server_loop)
        try:
            self._handle.server_loop.started.result(timeout)
        except TimeoutError:
            self.stop()
            raise InferenceError(
                Code.UNAVAILABLE, f"the start-up models were not loaded within {timeout} s"
            ) from None
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Drain for at most `exit_timeout_secs` and stop; returns when every model is closed.

        Unread responses of the calling thread are cancelled. Idempotent.
        """
        handle = self._handle
        if handle is None:
            return
        handle.refuse_here("async_stop")
        handle.close_own(of_thread=True)
        handle.stop()
        if not handle.over:
            handle.server_loop.ended.wait()
        if self._thread is not None:
            self._thread.join()

    async def async_start(self) -> Self:
        """Start on the running event loop; as `start`."""
        with self._lock:
            self._refuse_started()
            server_loop = ServerLoop(self._settings)
            self._task = asyncio.create_task(server_loop.run())
            self._handle = ServerHandle(server_loop)
        try:
            await asyncio.wrap_future(server_loop.started)
        except BaseException:
            await self.async_stop()
            raise
        return self

    async def async_stop(self) -> None:
        """Stop, as `stop`, for a server on any event loop.

        Unread responses of the calling task are cancelled. If the task is cancelled meanwhile, all
        remaining requests are cancelled.
        """
        handle = self._handle
        if handle is None:
            return
        handle.close_own(of_thread=False)
        handle.stop()
        if self._task is None or not handle.here:
            await asyncio.to_thread(self.stop)
            return
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait([self._task])
            raise

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await self.async_start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.async_stop()

    # State.

    def live(self) -> bool:
        """Whether the server accepts requests."""
        return self._handle is not None and not self._handle.over and not self._dataplane.exiting

    def ready(self) -> bool:
        """Whether the start-up models are loaded; with `strict_readiness`, all pass their checks.

        On the server's own loop the checks of models are skipped: use `async_ready` there.
        """
        if not self.live():
            return False
        if self._running.here:
            return self._running.look(lambda: self._dataplane.ready)
        return self._running.ask(self._check_ready, "async_ready")

    async def async_ready(self) -> bool:
        """As `ready`."""
        return self.live() and await self._running.async_ask(self._check_ready)

    def metadata(self) -> dict[str, Any]:
        """Name, version and extensions, in the form of the v2 protocol."""
        return metadata.server_metadata(self._settings.id)

    @property
    def ports(self) -> Mapping[str, int]:
        """The ports in use, by protocol: `http`, `grpc`, `metrics`."""
        return self._running.server_loop.started.result()

    def metrics(self) -> str:
        """Every metric in Prometheus' text format."""
        return self._running.ask(self._metrics, "async_metrics")

    async def async_metrics(self) -> str:
        """As `metrics`."""
        return await self._running.async_ask(self._metrics)

    # Models.

    def model(self, name: str, version: int | str = "") -> ModelHandle:
        """A handle of a model; `version` is by default the highest that serves."""
        return ModelHandle(self._running, name, str(version))

    def models(self, *, exclude_not_ready: bool = False) -> dict[tuple[str, str], ModelHandle]:
        """Every model in the repositories by name and version; "" is the version before a load.

        `state` and `reason` are those of the index (model repository extension).
        """
        return self._running.ask(lambda: self._models(exclude_not_ready), "async_models")

    async def async_models(
        self, *, exclude_not_ready: bool = False
    ) -> dict[tuple[str, str], ModelHandle]:
        """As `models`."""
        return await self._running.async_ask(lambda: self._models(exclude_not_ready))

    def load(self, name: str, parameters: Mapping[str, Any] | None = None) -> ModelHandle:
        """Load or reload a model; it serves when this returns.

        UNAVAILABLE unless `model_control_mode="explicit"`. `parameters` are those of the model
        repository extension: `config` is a configuration as JSON, or a mapping; `file:<path>` is
        the content of a file that replaces the repository's; `versions`, such as "4" or "3,4", are
        served besides those that serve.
        """
        return self._running.ask(lambda: self._load(name, parameters), "async_load")

    async def async_load(
        self, name: str, parameters: Mapping[str, Any] | None = None
    ) -> ModelHandle:
        """As `load`."""
        return await self._running.async_ask(lambda: self._load(name, parameters))

    def unload(
        self, model: str | ModelHandle, *, versions: str = "", unload_dependents: bool = False
    ) -> None:
        """Unload a model: look-ups fail when this returns. Unknown names are ignored.

        `versions`, such as "3" or "3,4", are unloaded alone while others serve.
        """

        self._running.ask(lambda: self._unload(model, versions, unload_dependents), "async_unload")

    async def async_unload(
        self, model: str | ModelHandle, *, versions: str = "", unload_dependents: bool = False
    ) -> None:
        """As `unload`."""
        await self._running.async_ask(lambda: self._unload(model, versions, unload_dependents))

    # On the server's loop.

    async def _check_ready(self) -> bool:
        return await self._dataplane.check_ready()

    async def _metrics(self) -> str:
        return await self._running.server_loop.metrics()

    async def _models(self, ready: bool) -> dict[tuple[str, str], ModelHandle]:
        rows = await self._dataplane.index(ready=ready)
        handle = self._running
        return {
            (row.name, row.version): ModelHandle(
                handle, row.name, row.version, str(row.state), row.reason
            )
            for row in rows
        }

    async def _load(self, name: str, parameters: Mapping[str, Any] | None) -> ModelHandle:
        if not isinstance(name, str):
            text = f"the model to load is a {type(name).__name__}, expected its name"
            raise InferenceError(Code.INVALID_ARG, text)
        with audited(self._dataplane.audit, PROGRAM, LOAD, name):
            await self._dataplane.load(name, read_override(parameters))
        return self.model(name)

    async def _unload(
        self, model: str | ModelHandle, versions: str, unload_dependents: bool
    ) -> None:
        name = model.name if isinstance(model, ModelHandle) else model
        with audited(self._dataplane.audit, PROGRAM, UNLOAD, name):
            some = read_versions(str(versions)) if versions else frozenset[int]()
            await self._dataplane.unload(name, some, unload_dependents=unload_dependents)

    @property
    def _running(self) -> ServerHandle:
        if self._handle is None:
            raise InferenceError(
                Code.INVALID_ARG, "the server has not been started: call start, or use `with`"
            )
        return self._handle

    @property
    def _dataplane(self) -> DataPlane:
        return self._running.server_loop.server.dataplane

    def _refuse_started(self) -> None:
        if self._handle is not None and not self._handle.over:
            raise InferenceError(Code.INVALID_ARG, "the server has been started already")
