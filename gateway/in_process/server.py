"""Sluice inside a program or a test: no sockets, numpy arrays in and out."""

import asyncio
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from gateway import server_info
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.in_process.handle import Link
from gateway.in_process.model import Model
from gateway.in_process.options import read_settings
from gateway.in_process.override import read_override
from gateway.in_process.server_loop import Home
from gateway.in_process.thread import HomeThread


class Server:
    """A server with the options of `sluice serve` as keywords, `_` for `-`.

    In a `with` block, or between `start` and `stop`, it has a thread of its own; in an `async with`
    block, or between `async_start` and `async_stop`, it runs on the event loop of the program. All
    methods may be called from any thread; on the server's own loop those that wait say which
    `async_` form to use instead. Everything that goes wrong is an InferenceError with its code.
    """

    def __init__(self, **options: Any) -> None:
        self._settings = read_settings(options)
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._thread: HomeThread | None = None
        self._task: asyncio.Task[None] | None = None

    # Living.

    def start(self, *, timeout: float | None = None) -> Self:
        """Start in a thread of its own; returns once the start-up models have been loaded.

        Raises InferenceError if one failed (unless `exit_on_error=False`), UNAVAILABLE if that took
        longer than `timeout` seconds, INVALID_ARG if it runs already; it does not run then.
        """
        with self._lock:
            self._refuse_started()
            self._thread = HomeThread(self._settings)
            self._link = Link(self._thread.home)
        try:
            self._link.home.started.result(timeout)
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
        """End: requests may end within `exit_timeout_secs`; returns when every model is closed.

        Responses that the calling thread has not read are cancelled. Idempotent.
        """
        link = self._link
        if link is None:
            return
        link.refuse_here("async_stop")
        link.close_own(of_thread=True)
        link.stop()
        if not link.over:
            link.home.ended.wait()
        if self._thread is not None:
            self._thread.join()

    async def async_start(self) -> Self:
        """Start on the running event loop; as `start`."""
        with self._lock:
            self._refuse_started()
            home = Home(self._settings)
            self._task = asyncio.create_task(home.run())
            self._link = Link(home)
        try:
            await asyncio.wrap_future(home.started)
        except BaseException:
            await self.async_stop()
            raise
        return self

    async def async_stop(self) -> None:
        """End; as `stop`, for a server on any event loop.

        Responses that the calling task has not read are cancelled. If the task is cancelled
        meanwhile, so are the requests that are left.
        """
        link = self._link
        if link is None:
            return
        link.close_own(of_thread=False)
        link.stop()
        if self._task is None or not link.here:
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

    # Telling.

    def live(self) -> bool:
        """Whether it takes requests."""
        return self._link is not None and not self._link.over and not self._dataplane.exiting

    def ready(self) -> bool:
        """Whether the start-up models have been loaded, and with `strict_readiness` none failed
        and each says that it is ready.

        On the server's own loop nothing can be asked of models: that is `async_ready`.
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
        """Name, version and extensions, as the v2 protocol has them."""
        return server_info.server_metadata(self._settings.id)

    @property
    def ports(self) -> Mapping[str, int]:
        """The ports that it listens on, of those that were asked for: `http`, `grpc`, `metrics`."""
        return self._running.home.started.result()

    def metrics(self) -> str:
        """Every metric in Prometheus' text format."""
        return self._running.ask(self._metrics, "async_metrics")

    async def async_metrics(self) -> str:
        """As `metrics`."""
        return await self._running.async_ask(self._metrics)

    # Models.

    def model(self, name: str, version: int | str = "") -> Model:
        """A model by name; `version` is by default the highest that serves. Looked up when used."""
        return Model(self._running, name, str(version))

    def models(self, *, exclude_not_ready: bool = False) -> dict[tuple[str, str], Model]:
        """Every model in the repositories by name and version; the version is "" if never loaded.

        `state` and `reason` of each are those of the index (model repository extension).
        """
        return self._running.ask(lambda: self._models(exclude_not_ready), "async_models")

    async def async_models(
        self, *, exclude_not_ready: bool = False
    ) -> dict[tuple[str, str], Model]:
        """As `models`."""
        return await self._running.async_ask(lambda: self._models(exclude_not_ready))

    def load(self, name: str, parameters: Mapping[str, Any] | None = None) -> Model:
        """Load or reload a model; it serves when this returns. UNAVAILABLE unless
        `model_control_mode="explicit"`.

        `parameters` are those of the model repository extension: `config` is a configuration as
        JSON, or a mapping; `file:<path>` has the bytes of a file in place of the repository's.
        """
        return self._running.ask(lambda: self._load(name, parameters), "async_load")

    async def async_load(self, name: str, parameters: Mapping[str, Any] | None = None) -> Model:
        """As `load`."""
        return await self._running.async_ask(lambda: self._load(name, parameters))

    def unload(self, model: str | Model, *, unload_dependents: bool = False) -> None:
        """Unload a model: no request finds it when this returns. Unknown names are fine."""
        self._running.ask(lambda: self._unload(model, unload_dependents), "async_unload")

    async def async_unload(self, model: str | Model, *, unload_dependents: bool = False) -> None:
        """As `unload`."""
        await self._running.async_ask(lambda: self._unload(model, unload_dependents))

    # On the server's loop.

    async def _check_ready(self) -> bool:
        return await self._dataplane.check_ready()

    async def _metrics(self) -> str:
        return (await self._running.home.metrics.render()).decode()

    async def _models(self, ready: bool) -> dict[tuple[str, str], Model]:
        rows = await self._dataplane.index(ready=ready)
        link = self._running
        return {
            (row.name, row.version): Model(link, row.name, row.version, str(row.state), row.reason)
            for row in rows
        }

    async def _load(self, name: str, parameters: Mapping[str, Any] | None) -> Model:
        if not isinstance(name, str):
            text = f"the model to load is a {type(name).__name__}, expected its name"
            raise InferenceError(Code.INVALID_ARG, text)
        await self._dataplane.load(name, read_override(parameters))
        return self.model(name)

    async def _unload(self, model: str | Model, unload_dependents: bool) -> None:
        name = model.name if isinstance(model, Model) else model
        await self._dataplane.unload(name, unload_dependents=unload_dependents)

    @property
    def _running(self) -> Link:
        if self._link is None:
            raise InferenceError(
                Code.INVALID_ARG, "the server has not been started: call start, or use `with`"
            )
        return self._link

    @property
    def _dataplane(self) -> DataPlane:
        return self._running.home.server.dataplane

    def _refuse_started(self) -> None:
        if self._link is not None and not self._link.over:
            raise InferenceError(Code.INVALID_ARG, "the server has been started already")
