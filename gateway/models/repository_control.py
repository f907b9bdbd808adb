"""Control of a model repository: loads at the start, polls, and loads and unloads on request."""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gateway.backend import ModelControl
from gateway.backend_loader import BackendLoader
from gateway.cache.cache import ResponseCache
from gateway.errors import Code, InferenceError, exiting
from gateway.event_loop import BusyPoll
from gateway.models.closings import Closings
from gateway.models.ensemble_members import poll_failed
from gateway.models.index import IndexRow, index_rows
from gateway.models.kept_facts import FactsFolder
from gateway.models.lifecycle import Lifecycle
from gateway.models.limits import is_cached
from gateway.models.loaded_models import LoadedModels
from gateway.models.loading import Infer, ModelLoader, SharedParts
from gateway.models.model import Model
from gateway.models.model_folder import Override, Snapshot
from gateway.models.model_names import check_name, check_new_name
from gateway.models.registry import ModelRegistry, VersionState, VersionStatus
from gateway.models.repository import ModelId, ModelRepository
from gateway.models.residents import Residents
from gateway.models.version_gate import NO_BLOCK, VersionGate, Within
from gateway.policy.areas import Area
from gateway.policy.audit import ABORTED, OK, AuditedChange, AuditLog
from gateway.policy.tenants import Tenants
from gateway.settings import EVERY_MODEL, ControlMode, ModelSettings
from gateway.storage.store import KEPT
from gateway.threads import Threads, listing_threads, load_threads, request_threads

log = logging.getLogger("sluice.lifecycle")

FACTS = "residence"
"""The folder of facts of models that are asleep, among the files that are kept."""

NOT_EXPLICIT = InferenceError(
    Code.UNAVAILABLE, "explicit model load / unload is not allowed if polling is enabled"
)

UNREACHABLE_SECS = 30.0
"""Interval of listings of a remote repository that could not be listed, without polls."""

SERVER, MODEL, PROGRAM = "server", "model", "program"
"""Causes of changes that no client has requested, in the audit log."""
LOAD, UNLOAD = "load", "unload"


@dataclass(frozen=True, slots=True)
class Changes:
    """Models to load, new or modified, by the state of their folders; models to unload."""

    load: Mapping[ModelId, Snapshot] = field(default_factory=dict)
    unload: tuple[ModelId, ...] = ()


def compare(
    before: Mapping[ModelId, Snapshot | None],
    now: Mapping[ModelId, Snapshot | Exception],
    serving: Iterable[ModelId],
) -> Changes:
    """The changes; `before` is the state of each folder at the last attempt to load it.

    A failed attempt is repeated only after a change of the folder. A model with an unreadable
    folder keeps its state.
    """
    return Changes(
        load={
            model: found
            for model, found in sorted(now.items())
            if not isinstance(found, Exception) and before.get(model) != found
        },
        unload=tuple(sorted(model for model in serving if model not in now)),
    )


class RepositoryControl:
    """Loads the models of a repository into the registry. One task runs it.

    Repositories are listed and models loaded in its own threads; `threads` are those of requests.
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
        self.registry = ModelRegistry()
        self._request_threads = threads or request_threads()
        self._threads = load_threads(settings.load_thread_count)
        self._listings = listing_threads() if repository.remote else self._threads
        self._repository = repository
        self.remote = repository.remote
        self._settings = settings
        self._backends = backends
        self._cache = cache
        self._closings = Closings()
        facts = settings.store / KEPT / FACTS if settings.store != Path() else None
        self.residents = Residents(
            settings.memory, self._threads, FactsFolder(facts), self.registry.notify
        )
        self.loaded = LoadedModels(
            self.registry.notify, busy_poll, self._closings, self.residents, settings.stall_secs
        )
        self.tenants: Tenants | None = None
        """The tenants that share the models which are loaded from now on."""
        self._lifecycle: Lifecycle | None = None
        self._unreadable: set[ModelId] = set()
        self._audit: AuditLog | None = None
        self._tasks: asyncio.TaskGroup | None = None

    async def index(self, *, ready: bool = False) -> list[IndexRow]:
        """Rows for models on disk, loaded or failed; `ready` keeps only READY versions."""
        on_disk = await self._request_threads.run(self._repository.ids)
        return index_rows(self.registry, on_disk, self.remote.downloading, ready=ready)

    # Operations.

    async def load(self, name: str, override: Override | None = None) -> None:
        """Load or reload a model from its files or the override; it serves when this returns.

        Raises InferenceError with Triton's texts (model repository extension): UNAVAILABLE unless
        the server is under explicit control; INVALID_ARG for a name that is none.
        """
        self._require_explicit()
        check_name(name)
        on_disk = await self._listings.run(self._named, name)
        if not on_disk and not (override and override.files):
            raise poll_failed(name, f"model '{name}' is not in any repository")
        if not on_disk:
            check_new_name(name)
        for model in on_disk or (ModelId(name),):
            await self._perform(model, self._running_lifecycle.load(model, override))
            known = self.registry.get(model)
            await self.residents.awaken(() if known is None else known.models)

    def _named(self, name: str) -> tuple[ModelId, ...]:
        """The models of a name, listed now where they are remote; blocks."""
        try:
            reason = self.remote.refresh(name)
        except InferenceError as error:
            raise poll_failed(name, error.message) from None
        found = self._repository.named(name)
        if reason and not found:
            raise poll_failed(name, reason)
        return found

    async def unload(
        self,
        name: str,
        versions: frozenset[int] = frozenset(),
        *,
        unload_dependents: bool = False,
    ) -> None:
        """Remove a model, or these versions, from look-ups; returns once draining has begun.

        An unknown name is no error. Raises UNAVAILABLE unless the server is under explicit control.
        """
        self._require_explicit()
        for known in tuple(self.registry):
            if known.id.name == name and known.of_fleet:
                raise InferenceError(Code.UNAVAILABLE, f"model '{name}' is hosted by replicas")
            if known.id.name == name:
                unload = self._running_lifecycle.unload(
                    known.id, versions, unload_dependents=unload_dependents
                )
                await self._perform(known.id, unload)

    async def adjust(self, model: ModelId, within: Within = NO_BLOCK) -> None:
        """Load and unload what the gate admits now; after an InferenceError nothing has changed."""
        await self._perform(model, self._running_lifecycle.adjust(model, within))

    def snapshot(self, model: ModelId) -> Snapshot:
        """The state of a model's folder; blocks, and may raise OSError and InferenceError."""
        return self._repository.snapshot(model)

    async def refresh(self, model: ModelId, within: Within = NO_BLOCK) -> None:
        """Load a model from its files, in every mode of control; raises as `adjust`."""
        await self._perform(model, self._running_lifecycle.follow(model, within=within))

    async def poll(self) -> None:
        """Load new and changed models, unload removed models; returns when all are done."""
        try:
            now = await self._listings.run(self._repository.snapshots)
        except InferenceError as error:
            log.error("repository poll failed", extra={"reason": error.reason})
            return
        except Exception:
            # Around one poll: the loaded models keep serving, and the next poll may succeed.
            log.exception("repository poll failed")
            return
        self._log_unreadable(now)
        before = {known.id: known.seen for known in self.registry}
        changes = compare(before, now, self._wanted())
        async with asyncio.TaskGroup() as tasks:
            for model, snapshot in changes.load.items():
                tasks.create_task(outcome(model, self._follow(model, snapshot)))
            for model in changes.unload:
                tasks.create_task(outcome(model, self._unload_removed(model)))

    async def _follow(self, model: ModelId, snapshot: Snapshot | None = None) -> None:
        """Load a model from its files, with a line in the audit log."""
        with audited(self._audit, SERVER, LOAD, str(model)):
            await self._running_lifecycle.follow(model, snapshot)

    async def _unload_removed(self, model: ModelId) -> None:
        with audited(self._audit, SERVER, UNLOAD, str(model)):
            await self._running_lifecycle.unload(model)

    def _log_unreadable(self, now: Mapping[ModelId, Snapshot | Exception]) -> None:
        """Log each unreadable folder once, until it is readable again."""
        errors = {model: each for model, each in now.items() if isinstance(each, Exception)}
        for model in errors.keys() - self._unreadable:
            extra = {"model": str(model)}
            log.error("model folder poll failed", extra=extra, exc_info=errors[model])
        self._unreadable = set(errors)

    def _wanted(self) -> list[ModelId]:
        return [
            known.id
            for known in self.registry
            if not known.of_fleet and (known.trouble or known.suspended is not None or known.wanted)
        ]

    @property
    def _running_lifecycle(self) -> Lifecycle:
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
            raise exiting()
        error: InferenceError | None = None
        task = self._tasks.create_task(outcome(model, operation))
        try:
            await asyncio.wait([task])
            if task.cancelled():
                operation.close()  # it may not have begun
                raise exiting()
            if (error := task.result()) is not None:
                raise error
        finally:
            # The traceback of the error refers to this frame: a cycle with the files of a load.
            del task, error

    def is_own(self, name: str) -> bool:
        """Whether a repository of this server has a model of that name."""
        known = self.registry.get(ModelId(name))
        found = [*self.registry.named(name), *([] if known is None else [known])]
        return any(not each.of_fleet for each in found)

    def cache_responses(self, model: Model, load: bytes) -> None:
        """Cache the responses of a model of replicas from now on, if server and config enable it.

        `load` is new for each load of the model at one of them.
        """
        if self._cache is not None and is_cached(model.config):
            model.use_cache(self._cache, load, self._request_threads)

    def place(self, model: Model) -> None:
        """Serve a model that replicas host, instead of the present one of its version."""
        known, number = self.registry.get_or_add(ModelId(model.name)), int(model.version)
        before = known.versions.get(number)
        known.versions[number] = VersionStatus(VersionState.READY, model=model)
        known.versions = dict(sorted(known.versions.items()))
        self.loaded.start(model, _nothing)
        if before is not None and before.model is not None:
            self.loaded.retire(before.model, _nothing)
        self.registry.notify()

    def displace(self, name: str, version: int) -> None:
        """End a version that no replica hosts any more, after its last request."""
        known = self.registry.get_or_add(ModelId(name))
        status = known.versions.pop(version, None)
        if status is not None and status.model is not None:
            self.loaded.retire(status.model, _nothing)
        if not known.versions:
            self.registry.remove(known.id)

    # Life cycle.

    async def run(
        self,
        infer: Infer,
        control: ModelControl | None = None,
        audit: AuditLog | None = None,
        gate: VersionGate | None = None,
    ) -> None:
        """Load the start-up models concurrently; serve and poll until cancelled.

        `infer` and `control` are passed to models, for calls of other models. `audit` gets a line
        for each load and unload that no client has requested. `gate` admits versions to loads.
        """
        self._audit = audit
        shared = SharedParts(
            cache=self._cache,
            control=control,
            find=self.registry.find,
            closings=self._closings,
            threads=self._threads,
            request_threads=self._request_threads,
            residents=self.residents,
            tenants=self.tenants,
        )
        loader = ModelLoader(self._backends, self._settings, infer, shared)
        self._lifecycle = Lifecycle(
            *(self.registry, self._repository, loader, self.loaded, self._threads),
            gate=gate or VersionGate(),
        )
        try:
            async with self.loaded.open():
                await self._operate()
        finally:
            self._listings.close()
            self._threads.close()

    async def _operate(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            try:
                await self._load_first()
                while self._settings.control_mode is ControlMode.POLL:
                    await asyncio.sleep(self._settings.poll_secs)
                    await self.poll()
                while self.remote:
                    await asyncio.sleep(UNREACHABLE_SECS)
                    await self._listings.run(self.remote.poll_unreachable)
                await asyncio.Event().wait()
            finally:
                self._tasks = None

    async def _load_first(self) -> None:
        await self.remote.settle()
        models = await self._threads.run(self._first)
        async with asyncio.TaskGroup() as loads:
            for model in models:
                loads.create_task(outcome(model, self._follow(model)))
        self.registry.settle()

    def _first(self) -> list[ModelId]:
        """The start-up models; a model that is in no repository fails when it is loaded."""
        explicit = self._settings.control_mode is ControlMode.EXPLICIT
        if not explicit or self._settings.startup == (EVERY_MODEL,):
            return list(self._repository.ids())
        found = {name: self._repository.named(name) for name in self._settings.startup}
        return [model for name in found for model in found[name] or (ModelId(name),)]

    def close_by(self, at: float) -> None:
        """Close or kill every instance before this time of the event loop."""
        self._closings.end_by(at)


def _nothing() -> None:
    """The end of a model that no repository lists."""


async def outcome(model: ModelId, operation: Coroutine[None, None, None]) -> InferenceError | None:
    """Run an operation on a model and return its error, so that others continue."""
    try:
        await operation
    except InferenceError as error:
        return error
    except Exception:
        # Around one model load, reload or unload: an error in it must not end the server.
        log.exception("model operation failed", extra={"model": str(model)})
        text = f"loading or unloading model '{model.name}' failed unexpectedly; see the log"
        return InferenceError(Code.INTERNAL, text)
    return None


@contextmanager
def audited(audit: AuditLog | None, by: str, action: str, model: str) -> Iterator[None]:
    """The block changes a model; its line is added to the audit log when it ends."""
    result, text = ABORTED, ""
    try:
        yield
        result = OK
    except InferenceError as error:
        result, text = error.code.name, error.message
        raise
    finally:
        if audit is not None:
            area, about = Area.MODEL_REPOSITORY, {"model": model}
            change = AuditedChange(area=area, action=action, by=by, about=about)
            audit.add(change, result, text)
