"""Loads, reloads and unloads of models that drop no request."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from gateway.errors import Code, InferenceError
from gateway.models.ensemble_members import (
    INTERRUPTED,
    EnsembleMembers,
    LoadFailure,
    MemberWaits,
    cause,
    dependents,
    kept_alive,
    load_failed,
    member_failed,
    orphans,
    poll_failed,
    versions_failed,
)
from gateway.models.instance_groups import InPlaceUpdate
from gateway.models.loaded_models import LoadedModels, ServedVersions
from gateway.models.loading import Loaded, LoadedMembers, ModelLoader
from gateway.models.model_folder import Override, Snapshot
from gateway.models.registry import UNLOADED, KnownModel, ModelRegistry, members
from gateway.models.repository import LoadSource, ModelId, ModelRepository
from gateway.models.version_gate import NO_BLOCK, VersionGate, Within
from gateway.threads import Threads

log = logging.getLogger("sluice.lifecycle")

Found = TypeVar("Found")


class Lifecycle:
    """Loads, reloads and unloads models; no other class changes the versions in the table.

    Operations on one model run one after another; operations on different models run concurrently.
    The versions of a model load as one: either all of them replace the served versions, or nothing
    changes.

    An ensemble is loaded with the loaded versions of its members, and again when these change. It
    is suspended, that is unloaded, while its members do not suit it.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        repository: ModelRepository,
        loader: ModelLoader,
        loaded: LoadedModels,
        threads: Threads,
        gate: VersionGate,
    ) -> None:
        self._threads = threads
        self._gate = gate
        self._registry = registry
        self._repository = repository
        self._loader = loader
        self._served = ServedVersions(registry, loaded)
        self._members = EnsembleMembers(registry, repository, threads)
        self._locks: WeakValueDictionary[ModelId, asyncio.Lock] = WeakValueDictionary()
        self._waits = MemberWaits()

    async def load(self, model: ModelId, override: Override | None = None) -> None:
        """Load a model on a client's request; it serves when this returns.

        Versions of the override are served besides those that serve; without any it is those of the
        policy. Nothing happens if they serve and the files are unchanged. Raises InferenceError
        with Triton's texts; the versions that served before then stay READY.
        """
        await self._then_ripple(lambda changed: self._load(model, override, changed))

    async def follow(
        self, model: ModelId, snapshot: Snapshot | None = None, *, within: Within = NO_BLOCK
    ) -> None:
        """Load a model from its files, at the start or after a change on disk.

        `snapshot` is the state of its folder if a poll has scanned it. The load is `within` a block
        if there is one. Raises like `load`; the registry keeps the failure.
        """
        await self._then_ripple(lambda changed: self._load_files(model, snapshot, changed, within))

    async def adjust(self, model: ModelId, within: Within = NO_BLOCK) -> None:
        """Load and unload what the gate admits now of the source of the last load."""
        await self._then_ripple(lambda changed: self._adjust(model, changed, within))

    async def _adjust(self, model: ModelId, changed: list[ModelId], within: Within) -> None:
        async with self._lock(model):
            with within:
                known = self._registry.get(model)
                if known is not None and known.source is not None:
                    if (upload := known.source.upload) is not None:
                        upload.hold()
                    await self._apply(known, known.source, changed, again=False)
                    changed.append(model)  # a label may have moved

    async def _load(
        self, model: ModelId, override: Override | None, changed: list[ModelId]
    ) -> None:
        versions = override.versions if override is not None else frozenset[int]()
        async with self._lock(model):
            try:
                source = await self._read(model, override=override)
            except InferenceError as error:
                log.error("model unreadable", extra=_extra(model, error))
                raise poll_failed(model.name, error.message) from None
            source.entry.require(versions)
            known = self._registry.get_or_add(model)
            known.implicit = False
            if versions:
                source = known.choosing(source, versions)
            with known.attempt():
                await self._apply(known, source, changed, again=True)
                if refused := {n: known.versions[n].error for n in versions - known.loaded}:
                    raise versions_failed(model.name, refused)

    async def _load_files(
        self, model: ModelId, snapshot: Snapshot | None, changed: list[ModelId], within: Within
    ) -> None:
        async with self._lock(model):
            with within:
                known = self._registry.get_or_add(model)
                known.implicit = False
                if snapshot is not None:
                    known.seen = snapshot
                await self._follow(known, changed, scan=snapshot is None, again=False)

    async def _follow(
        self, known: KnownModel, changed: list[ModelId], *, scan: bool, again: bool
    ) -> None:
        with known.attempt():
            try:
                if scan:
                    known.seen = await self._blocking(known.id, self._repository.snapshot)
                source = await self._read(known.id, seen=known.seen)
            except InferenceError as error:
                if not scan:
                    await self._forget_missing(known)
                self._served.note_unreadable(known, error)
                log.error("model unreadable", extra=_extra(known.id, error))
                raise
            await self._apply(known, source, changed, again=again)

    async def _forget_missing(self, known: KnownModel) -> None:
        """A folder that is missing since the poll is new to the poll that finds it again."""
        with suppress(InferenceError):
            if not await self._blocking(known.id, self._repository.snapshot):
                known.seen = {}

    async def _then_ripple(self, load: Callable[[list[ModelId]], Awaitable[None]]) -> None:
        """Load a model, then reload the ensembles that call the changed models."""
        changed: list[ModelId] = []
        try:
            await load(changed)
        except InferenceError:
            await self._ripple(changed)
            raise
        await self._ripple(changed)

    async def unload(
        self,
        model: ModelId,
        versions: frozenset[int] = frozenset(),
        *,
        unload_dependents: bool = False,
    ) -> None:
        """Remove a model from look-ups at once; it closes after its last request.

        With `versions` only these are removed, while others serve. Ensembles that call it are
        unloaded too. `unload_dependents` also unloads the members that only this model needed. A
        load of the model under way ends at once, unless single versions are unloaded.
        """
        if not versions:
            self._interrupt(model)
        source: LoadSource | None = None
        async with self._lock(model):
            known = self._registry.get(model)
            if known is None or (versions and known.source is None):
                return
            if not (versions and self._served.drop_some(known, versions)):
                source = known.source
                self._end(known)
        await self._ripple([model])
        if unload_dependents and source is not None:
            for orphan in orphans(source.config, self._registry):
                await self.unload(orphan.id, unload_dependents=True)

    def _end(self, known: KnownModel) -> None:
        self._served.drop(known, UNLOADED)
        self._gate.unloaded(known)
        known.members = ()
        known.suspend(None)
        if not known.versions:
            self._registry.remove(known.id)

    def _interrupt(self, model: ModelId) -> None:
        known = self._registry.get(model)
        if known is not None and known.loading is not None:
            known.loading.reschedule(asyncio.get_running_loop().time())
            known.loading = None

    def _lock(self, model: ModelId) -> asyncio.Lock:
        return self._locks.setdefault(model, asyncio.Lock())

    async def _read(
        self, model: ModelId, *, override: Override | None = None, seen: Snapshot | None = None
    ) -> LoadSource:
        if override is None or not override.replaces:
            source = partial(self._repository.source, snapshot=seen)
        else:
            source = partial(self._repository.overridden, override=override)
        return await self._blocking(model, source)

    async def _blocking(self, model: ModelId, read: Callable[[ModelId], Found]) -> Found:
        """The result of a blocking read of a model's folder; raises InferenceError."""
        try:
            return await self._threads.run(read, model)
        except OSError as error:
            raise InferenceError(
                Code.INTERNAL, f"model '{model.name}' cannot be read: {error.strerror}"
            ) from None
        except InferenceError:
            raise
        except Exception:
            # Around one model load: an unforeseen file must not stop the loads of others.
            log.exception("reading failed", extra={"model": str(model)})
            text = f"model '{model.name}' cannot be read; the server's log says why"
            raise InferenceError(Code.INTERNAL, text) from None

    async def _apply(
        self, known: KnownModel, source: LoadSource, changed: list[ModelId], *, again: bool
    ) -> None:
        """Load what the gate admits of the source, if it differs from what serves.

        `changed` gets the model and each member that was loaded for an ensemble. With `again` a
        member is loaded even if its last load has failed.
        """
        try:
            await self._apply_admitted(known, source, changed, again=again)
        except InferenceError as error:
            if not self._gate.failed(known, error):
                if known.members and known.source is None:
                    known.suspend(source)
                raise
            await self._apply_admitted(known, source, changed, again=False)
        finally:
            if source.upload is not None:
                source.upload.release()
            self._registry.notify()

    async def _apply_admitted(
        self, known: KnownModel, source: LoadSource, changed: list[ModelId], *, again: bool
    ) -> None:
        source = await self._gate.admit(known, source, again=again)
        if known.serves(source):
            self._gate.loaded(known)
            return
        known.members = members(source.config)
        bound = await self._require(known, source, changed, again=again)
        await self._replace(known, source, bound)
        changed.append(known.id)

    async def _replace(self, known: KnownModel, source: LoadSource, bound: LoadedMembers) -> None:
        try:
            numbers = known.wanted_versions(source)
        except InferenceError as error:
            if not known.models:
                known.trouble, known.readable = error.reason, True
            raise load_failed(known.id.name, error.message) from None
        known.trouble, known.readable = "", True
        known.begin_loading(numbers)
        with kept_alive(bound.values()):
            outcomes = await self._load_versions(known, source, numbers, bound)
        errors = {n: each for n, each in outcomes.items() if isinstance(each, InferenceError)}
        if errors:
            known.fail_loading(errors)
            await self._loader.close(outcomes.values())
            raise versions_failed(known.id.name, errors)
        loaded = {n: each for n, each in outcomes.items() if not isinstance(each, InferenceError)}
        self._swap(known, source, loaded)
        self._gate.loaded(known)
        known.bound = frozenset(bound.values())
        known.suspend(None)

    async def _load_versions(
        self, known: KnownModel, source: LoadSource, numbers: Sequence[int], bound: LoadedMembers
    ) -> Mapping[int, Loaded | InferenceError]:
        """Each version, or its error; `unload` interrupts the load."""
        try:
            async with asyncio.timeout(None) as known.loading:
                kept = known.unchanged_versions(source, frozenset(bound.values()))
                return await self._loader.load_versions(source, numbers, kept, bound, known.models)
        except TimeoutError:
            return dict.fromkeys(numbers, INTERRUPTED)
        finally:
            known.loading = None

    # Ensembles.

    async def _require(
        self, known: KnownModel, source: LoadSource, changed: list[ModelId], *, again: bool
    ) -> LoadedMembers:
        """The members of an ensemble; missing members are loaded. Raises LoadFailure."""
        try:
            for member in await self._members.members(known):
                needed = self._registry.get_or_add(member)
                try:
                    with self._waits.entered(known.id, member):
                        await self._require_member(needed, changed, again=again)
                except InferenceError as error:
                    raise member_failed(known.id.name, needed, error) from None
            return self._members.bind(known.id, source.config)
        except InferenceError as error:
            if not known.models:
                known.trouble = f"{Code.INVALID_ARG.value}: {cause(error)}"
                known.readable = False
            raise

    async def _require_member(
        self, known: KnownModel, changed: list[ModelId], *, again: bool
    ) -> None:
        if known.models:
            return
        before = known.attempts
        async with self._lock(known.id):
            if known.models:
                return
            if known.failure is not None and (not again or known.attempts != before):
                raise known.failure.again()
            known.implicit = True
            await self._follow(known, changed, scan=True, again=again)

    async def _ripple(self, changed: Iterable[ModelId]) -> None:
        """Reload the ensembles of changed members, and the ensembles that call those."""
        pending = deque(changed)
        while pending:
            name = pending.popleft().name
            for needing in dependents(name, self._registry):
                if await self._reconsider(needing.id):
                    pending.append(needing.id)

    async def _reconsider(self, model: ModelId) -> bool:
        """Reload an ensemble if its members have changed; whether anything changed."""
        async with self._lock(model):
            known = self._registry.get(model)
            source = None if known is None else known.source or known.suspended
            if known is None or source is None:
                return False
            try:
                bound = self._members.bind(model, source.config)
                if known.source is not None and known.bound == frozenset(bound.values()):
                    return False
                await self._replace(known, source, bound)
            except InferenceError as error:
                about = {"model": str(model), "reason": cause(error)}
                if known.source is not None and isinstance(error, LoadFailure) and error.by_golden:
                    log.warning("ensemble keeps its members", extra=about)
                    known.keep_members(cause(error))
                    return False
                log.warning("ensemble out of service", extra=about)
                return self._suspend(known, source)
            finally:
                self._registry.notify()
            return True

    def _suspend(self, known: KnownModel, source: LoadSource) -> bool:
        """Unload an ensemble until its members suit it; whether it was loaded."""
        served = known.source is not None
        known.suspend(source)
        if served:
            self._served.drop(known, UNLOADED)
        return served

    def _swap(self, known: KnownModel, source: LoadSource, loaded: Mapping[int, Loaded]) -> None:
        """Direct every request to the loaded versions, in one synchronous step."""
        for number, status in known.versions.items():
            if not isinstance(loaded.get(number), InPlaceUpdate):
                self._served.retire(status, UNLOADED)
        for each in loaded.values():
            if isinstance(each, InPlaceUpdate):
                each.commit()
            else:
                self._served.start(known, source, each)
        known.versions = dict(sorted(known.versions.items()))
        known.source = source


def _extra(model: ModelId, error: InferenceError) -> Mapping[str, object]:
    return {"model": str(model), "reason": error.reason}
