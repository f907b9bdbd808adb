"""How do models come, change and go, without a request being lost?"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models.dependencies import dependents, members, orphans
from gateway.models.identity import ModelId
from gateway.models.loading import InPlaceUpdate
from gateway.models.lookup import UNLOADED, Known, ModelTable, State, Status
from gateway.models.model import Model
from gateway.models.override import Override
from gateway.models.repository import IN_TWO_REPOSITORIES, ModelRepository, Source
from gateway.models.running import RunningModels
from gateway.models.snapshot import without_configs
from gateway.models.version_loads import Loaded, VersionLoads, close_all

log = logging.getLogger("sluice.lifecycle")


class Lifecycle:
    """Loads, reloads and unloads models; alone in changing the table.

    Operations on one model wait for each other, those on others do not. The versions of a model
    load as one: either all of them serve, in place of what served before, or nothing changes.
    """

    def __init__(
        self,
        table: ModelTable,
        repository: ModelRepository,
        loads: VersionLoads,
        running: RunningModels,
        notify: Callable[[], None],
    ) -> None:
        self._table = table
        self._repository = repository
        self._loads = loads
        self._running = running
        self._notify = notify
        self._locks: WeakValueDictionary[ModelId, asyncio.Lock] = WeakValueDictionary()

    async def load(self, model: ModelId, override: Override | None = None) -> None:
        """Load what a client asked for; it serves when this returns.

        Nothing happens if it serves already and its files are as they were. Raises InferenceError
        with Triton's texts; what served before then goes on.
        """
        async with self._lock(model):
            try:
                source = await self._read(model, override)
            except InferenceError as error:
                log.error("model unreadable", extra=_extra(model, error))
                raise unread(model.name, error) from None
            known = self._table.know(model)
            known.implicit = False
            await self._apply(known, source)

    async def follow(self, model: ModelId, *, implicit: bool = False) -> None:
        """Load what is on disk, at the start or because it has changed there.

        Raises like `load`; what is wrong with the model is noted where everybody sees it.
        """
        async with self._lock(model):
            known = self._table.know(model)
            known.implicit = implicit
            try:
                known.seen = await asyncio.to_thread(self._repository.snapshot, model)
                source = await self._read(model, None)
            except InferenceError as error:
                log.error("model unreadable", extra=_extra(model, error))
                self._note_unreadable(known, error)
                raise
            await self._apply(known, source)

    async def unload(self, model: ModelId, *, unload_dependents: bool = False) -> None:
        """Take a model away from lookups at once; it ends when its last request has.

        Models that need it go too, and with `unload_dependents` those that only it needed.
        """
        async with self._lock(model):
            known = self._table.get(model)
            if known is None:
                return
            source = known.source
            self._drop(known, UNLOADED)
            if not known.versions:
                self._table.forget(model)
        for needing in dependents(model.name, self._table):
            await self.unload(needing.id)
        if unload_dependents and source is not None:
            for orphan in orphans(source.config, self._table):
                await self.unload(orphan.id, unload_dependents=True)

    def _lock(self, model: ModelId) -> asyncio.Lock:
        return self._locks.setdefault(model, asyncio.Lock())

    async def _read(self, model: ModelId, override: Override | None) -> Source:
        try:
            if override is None:
                return await asyncio.to_thread(self._repository.source, model)
            return await asyncio.to_thread(self._repository.overridden, model, override)
        except OSError as error:
            raise InferenceError(
                Code.INTERNAL, f"model '{model.name}' cannot be read: {error.strerror}"
            ) from None
        except InferenceError:
            raise
        except Exception:
            # Around one model load: a file nobody has foreseen must not take the others along.
            log.exception("reading failed", extra={"model": str(model)})
            text = f"model '{model.name}' cannot be read; the server's log says why"
            raise InferenceError(Code.INTERNAL, text) from None

    def _note_unreadable(self, known: Known, error: InferenceError) -> None:
        if error.message == IN_TWO_REPOSITORIES:
            self._drop(known, error.message)
        if not known.models:
            known.versions.clear()
            known.trouble, known.readable = _index_reason(error), False
        self._notify()

    async def _apply(self, known: Known, source: Source) -> None:
        """Make what is loaded what the source says, if it differs."""
        try:
            if _is_served(known, source):
                return
            await self._require(known.id.name, members(source.config))
            await self._replace(known, source)
        finally:
            if source.upload is not None:
                source.upload.release()
            self._notify()

    async def _require(self, ensemble: str, names: tuple[str, ...]) -> None:
        """Load the members that an ensemble lacks; INVALID_ARG names one that cannot be loaded."""
        for name in names:
            if any(known.models for known in self._table.named(name)):
                continue
            try:
                await self.follow(ModelId(name), implicit=True)
            except InferenceError as error:
                why = f"it needs model '{name}', which is not loaded: {error.reason}"
                raise _failed(ensemble, why) from None

    async def _replace(self, known: Known, source: Source) -> None:
        try:
            numbers = source.entry.versions(source.config.version_policy)
        except InferenceError as error:
            if not known.models:
                known.trouble, known.readable = error.reason, True
            raise _failed(known.id.name, error.message) from None
        known.trouble, known.readable = "", True
        _show_loading(known, numbers)
        outcomes = await self._loads.load(source, numbers, _kept(known, source))
        errors = {n: each for n, each in outcomes.items() if isinstance(each, InferenceError)}
        if errors:
            _show_failed(known, errors)
            await close_all(outcomes.values())
            raise _failed(known.id.name, _clauses(errors))
        loaded = {n: each for n, each in outcomes.items() if not isinstance(each, InferenceError)}
        self._swap(known, source, loaded)

    def _swap(self, known: Known, source: Source, loaded: Mapping[int, Loaded]) -> None:
        """In one plain step: from here on every request goes to what was loaded."""
        for number, status in known.versions.items():
            if not isinstance(loaded.get(number), InPlaceUpdate):
                self._retire(status, UNLOADED)
        for number, each in loaded.items():
            if isinstance(each, InPlaceUpdate):
                each.commit()
            else:
                known.versions[number] = Status(State.READY, model=each)
                self._start(known, source, each)
        known.versions = dict(sorted(known.versions.items()))
        known.source = source

    def _start(self, known: Known, source: Source, model: Model) -> None:
        model.namespace = known.id.namespace
        if source.upload is not None:
            source.upload.hold()
        self._running.start(model, source.upload.release if source.upload else _nothing)

    def _drop(self, known: Known, reason: str) -> None:
        for status in known.versions.values():
            self._retire(status, reason)
        known.source = known.seen = None
        known.trouble = ""
        self._notify()

    def _retire(self, status: Status, reason: str) -> None:
        """A version takes no more requests; once it has ended, the reason says why."""

        def ended() -> None:
            status.state, status.reason = State.UNAVAILABLE, reason
            self._notify()

        if status.model is not None:
            model, status.model = status.model, None
            status.state = State.UNLOADING
            self._running.retire(model, ended)
        elif status.state is not State.UNLOADING:
            ended()


def unread(name: str, error: InferenceError) -> InferenceError:
    """The error for a load that never began: the model is absent, or its config is no good."""
    return InferenceError(
        Code.INTERNAL,
        f"failed to load '{name}', failed to poll from model repository: {error.message}",
    )


def _is_served(known: Known, source: Source) -> bool:
    """Whether all that the source asks for was loaded from the very same files, and serves."""
    served = known.source
    if served is None or source.overridden or served.overridden:
        return False
    return served.snapshot == source.snapshot and all(model.ready for model in known.models)


def _kept(known: Known, source: Source) -> Mapping[int, Model]:
    """The versions that only need other instances (in-place update), since nothing else differs.

    A client's config that changes nothing at all asks for a real load.
    """
    served = known.source
    if served is None or served.upload or source.upload or members(source.config):
        return {}
    if without_configs(served.snapshot) != without_configs(source.snapshot):
        return {}
    if source.overridden and source.config == served.config:
        return {}
    if _without_instances(source.config) != _without_instances(served.config):
        return {}
    return {int(model.version): model for model in known.models if model.ready}


def _without_instances(config: ModelConfig) -> ModelConfig:
    return replace(config, instance_group=(), version_policy=None)


def _show_loading(known: Known, numbers: Sequence[int]) -> None:
    for number in numbers:
        status = known.versions.get(number)
        if status is None or status.model is None:
            known.versions[number] = Status(State.LOADING)
    known.versions = dict(sorted(known.versions.items()))


def _show_failed(known: Known, errors: Mapping[int, InferenceError]) -> None:
    """Versions load as one: those that would have served are as good as unloaded."""
    for number, status in known.versions.items():
        if status.state is State.LOADING:
            status.state = State.UNAVAILABLE
            status.reason = errors[number].reason if number in errors else UNLOADED


def _clauses(errors: Mapping[int, InferenceError]) -> str:
    return "".join(
        f"version {number} is at UNAVAILABLE state: {error.reason};"
        for number, error in sorted(errors.items())
    )


def _failed(name: str, why: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, f"load failed for model '{name}': {why}\n")


def _index_reason(error: InferenceError) -> str:
    return error.message if error.message == IN_TWO_REPOSITORIES else error.reason


def _extra(model: ModelId, error: InferenceError) -> Mapping[str, object]:
    return {"model": str(model), "reason": error.reason}


def _nothing() -> None:
    """Called when a model has been closed whose files are not ours to delete."""
