"""The registry of loaded models: look-ups, operations on models, start-up and polling."""

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping

from gateway.backend import ModelControl
from gateway.backend_loader import BackendLoader
from gateway.cache.cache import ResponseCache
from gateway.errors import Code, InferenceError
from gateway.models.busy_poll import BusyPoll
from gateway.models.closings import Closings
from gateway.models.lifecycle import Lifecycle
from gateway.models.load_failures import outcome, poll_failed
from gateway.models.loading import Infer, ModelLoader, SharedParts
from gateway.models.model import Model
from gateway.models.model_folder import Override
from gateway.models.model_tasks import ModelTasks
from gateway.models.poller import Poller
from gateway.models.repository import ModelId, ModelRepository
from gateway.models.table import IndexRow, ModelTable, rows, unknown
from gateway.models.version_loads import VersionLoads
from gateway.settings import EVERY_MODEL, ControlMode, ModelSettings
from gateway.threads import Threads, load_threads, request_threads

log = logging.getLogger("sluice.registry")

NOT_EXPLICIT = InferenceError(
    Code.UNAVAILABLE, "explicit model load / unload is not allowed if polling is enabled"
)
EXITING = InferenceError(Code.UNAVAILABLE, "Server exiting")


class ModelRegistry:
    """Loads models, looks them up, drains and closes them. One task runs it.

    Files are read and models loaded in its own threads; `threads` are the threads of requests.
    """

    def __init__(
        self,
        repository: ModelRepository,
        settings: ModelSettings,
        backends: BackendLoader,
        cache: ResponseCache | None = None,
        busy_poll: BusyPoll | None = None,
        threads: Threads | None = None,
    ) -> None:
        self._request_threads = threads or request_threads()
        self._threads = load_threads(settings.load_thread_count)
        self._repository = repository
        self._settings = settings
        self._backends = backends
        self._cache = cache
        self._table = ModelTable()
        self._closings = Closings()
        awake = busy_poll or BusyPoll()
        self._running = ModelTasks(self.notify, awake, self._closings, settings.stall_secs)
        self._settled = asyncio.Event()
        self._changed = asyncio.Event()
        self._lifecycle: Lifecycle | None = None
        self._poller: Poller | None = None
        self._tasks: asyncio.TaskGroup | None = None

    # Look-ups.

    @property
    def settled(self) -> bool:
        """Whether each start-up model has been loaded or has failed."""
        return self._settled.is_set()

    def find(self, name: str, version: str) -> Model:
        """The named version; for "" the highest ready version, else the highest loaded version.

        Raises InferenceError with Triton's lookup texts: NOT_FOUND, UNAVAILABLE, INVALID_ARG.
        """
        if (model := self._table.find(name, version)) is not None:
            return model
        if not self.settled:
            raise InferenceError(Code.UNAVAILABLE, "Server not ready")
        raise unknown(name)

    def ready_versions(self, name: str) -> list[Model]:
        """The ready versions of a model, lowest first."""
        found = self._table.named(name)
        return [model for known in found for model in known.models if model.ready]

    def models(self) -> Iterator[Model]:
        """Every loaded version, ordered by name and version."""
        return self._table.models()

    def failures(self) -> Mapping[str, str]:
        """The reason for each version that is not ready, by `name` or `name version N`."""
        return self._table.failures()

    async def index(self, *, ready: bool = False) -> list[IndexRow]:
        """Rows for models on disk, loaded or failed; `ready` keeps only READY versions."""
        return rows(self._table, await self._request_threads.run(self._repository.ids), ready=ready)

    # Operations.

    async def load(self, name: str, override: Override | None = None) -> None:
        """Load or reload a model from its files or the override; it serves when this returns.

        Raises InferenceError with Triton's texts (model repository extension): UNAVAILABLE unless
        the server is under explicit control.
        """
        self._require_explicit()
        _check_name(name)
        on_disk = await self._threads.run(self._repository.named, name)
        if not on_disk and not (override and override.files):
            raise poll_failed(name, f"model '{name}' is not in any repository")
        for model in on_disk or (ModelId(name),):
            await self._perform(model, self._control.load(model, override))

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Remove a model from look-ups; returns once its draining has begun.

        An unknown name is no error. Raises UNAVAILABLE unless the server is under explicit control.
        """
        self._require_explicit()
        for known in tuple(self._table):
            if known.id.name == name:
                unload = self._control.unload(known.id, unload_dependents=unload_dependents)
                await self._perform(known.id, unload)

    async def poll(self) -> None:
        """Load new and changed models, unload removed models; returns when all are done."""
        if self._poller is not None:
            await self._poller.poll()

    @property
    def _control(self) -> Lifecycle:
        if self._lifecycle is None:
            raise InferenceError(Code.UNAVAILABLE, "Server not ready")
        return self._lifecycle

    def _require_explicit(self) -> None:
        if self._settings.control_mode is not ControlMode.EXPLICIT:
            raise NOT_EXPLICIT.with_traceback(None)  # each raise would add to it

    async def _perform(self, model: ModelId, operation: Coroutine[None, None, None]) -> None:
        """Run an operation to its end, even if its caller is cancelled."""
        if self._tasks is None:
            operation.close()
            raise EXITING.with_traceback(None)
        task = self._tasks.create_task(outcome(model, operation))
        await asyncio.wait([task])
        if task.cancelled():
            raise EXITING.with_traceback(None)
        if (error := task.result()) is not None:
            raise error

    # Life cycle.

    async def run(self, infer: Infer, control: ModelControl | None = None) -> None:
        """Load the start-up models concurrently; serve and poll until cancelled.

        `infer` and `control` are passed to models, for calls of other models.
        """
        shared = SharedParts(
            self._cache, control, self._closings, self._threads, self._request_threads
        )
        loader = ModelLoader(self._backends, self._settings, infer, shared)
        loads = VersionLoads(
            loader, self._settings.load_thread_count, self._settings.load_retry_count
        )
        self._lifecycle = Lifecycle(
            self._table, self._repository, loads, self._running, self.notify, self._threads
        )
        self._poller = Poller(self._repository, self._table, self._lifecycle, self._threads)
        try:
            async with self._running.open():
                await self._operate()
        finally:
            self._threads.close()

    async def _operate(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            try:
                await self._load_first()
                while self._settings.control_mode is ControlMode.POLL:
                    await asyncio.sleep(self._settings.poll_secs)
                    await self.poll()
                await asyncio.Event().wait()
            finally:
                self._tasks = None

    async def _load_first(self) -> None:
        models = await self._threads.run(self._first)
        async with asyncio.TaskGroup() as loads:
            for model in models:
                loads.create_task(outcome(model, self._control.follow(model)))
        self._settled.set()
        self.notify()

    def _first(self) -> list[ModelId]:
        """The start-up models; a model that is in no repository fails when it is loaded."""
        explicit = self._settings.control_mode is ControlMode.EXPLICIT
        if not explicit or self._settings.startup == (EVERY_MODEL,):
            return list(self._repository.ids())
        found = {name: self._repository.named(name) for name in self._settings.startup}
        return [model for name in found for model in found[name] or (ModelId(name),)]

    async def wait_settled(self) -> None:
        """Wait until each start-up model has been loaded or has failed."""
        await self._settled.wait()

    async def changed(self) -> None:
        """Wait until the readiness of a model may have changed."""
        await self._changed.wait()

    async def sequences_ended(self) -> None:
        """Wait until no sequence of any model accepts more requests."""
        await self._running.sequences_ended()

    async def drained(self) -> None:
        """Wait until no request is in flight in any model."""
        await self._running.drained()

    def abandon(self, error: InferenceError) -> None:
        """End every request in flight with this error."""
        self._running.abandon(error)

    def close_by(self, at: float) -> None:
        """Close or kill every instance before this time of the event loop."""
        self._closings.end_by(at)

    @property
    def in_flight(self) -> int:
        """Number of requests in flight in all models."""
        return self._running.in_flight

    def notify(self) -> None:
        """Wake the tasks that wait in `changed`."""
        self._changed.set()
        self._changed = asyncio.Event()


def _check_name(name: str) -> None:
    if not name.strip():
        raise InferenceError(
            Code.INVALID_ARG, "Model name cannot be empty. Please enter a valid name to deploy."
        )
    if "/" in name or "\0" in name or name.strip() == "..":
        raise InferenceError(
            Code.INVALID_ARG,
            f"invalid model name '{name}', model name must not contain path traversal characters",
        )


class RegistryControl:
    """Implements `ModelControl`, the calls that a model may make on other models.

    Raises UNAVAILABLE until the start-up models are loaded.
    """

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry

    async def load(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load or reload a model, as a client can (model repository extension)."""
        self._refuse_if_starting()
        override = Override(config or None, files) if config or files else None
        await self._registry.load(name, override)

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Begin to unload a model, as a client can."""
        self._refuse_if_starting()
        await self._registry.unload(name, unload_dependents=unload_dependents)

    def ready(self, name: str, version: str) -> bool:
        """Whether a request would be accepted; False for an unknown model."""
        try:
            return self._find(name, version).ready
        except InferenceError as error:
            if error.code is Code.INVALID_ARG:
                raise
            return False

    def decoupled(self, name: str, version: str) -> bool:
        """Whether a request to the model may have any number of responses."""
        return self._find(name, version).config.decoupled

    def _find(self, name: str, version: str) -> Model:
        return self._registry.find(name, version)

    def _refuse_if_starting(self) -> None:
        if not self._registry.settled:
            raise InferenceError(Code.UNAVAILABLE, "Server not ready")
