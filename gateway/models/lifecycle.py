"""How do models come, change and go, without a request being lost?"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from weakref import WeakValueDictionary

from gateway.errors import Code, InferenceError
from gateway.models.ensemble_members import (
    EnsembleMembers,
    MemberWaits,
    dependents,
    kept_alive,
    members,
    orphans,
)
from gateway.models.load_failures import cause, load_failed, member_failed, poll_failed, read_folder
from gateway.models.loading import InPlaceUpdate, LoadedMembers
from gateway.models.model import Model
from gateway.models.model_folder import Snapshot
from gateway.models.model_tasks import ModelTasks
from gateway.models.repository import IN_TWO_REPOSITORIES, LoadSource, ModelId, ModelRepository
from gateway.models.table import UNLOADED, KnownModel, ModelTable, VersionState, VersionStatus
from gateway.models.upload import Override
from gateway.models.version_loads import (
    Loaded,
    VersionLoads,
    close_all,
    is_served,
    unchanged_versions,
)
from gateway.threads import Threads

log = logging.getLogger("sluice.lifecycle")

INTERRUPTED = InferenceError(Code.UNAVAILABLE, "it was unloaded while it was being loaded")


class Lifecycle:
    """Loads, reloads and unloads models; alone in changing the table.

    Operations on one model wait for each other, those on others do not. The versions of a model
    load as one: either all of them serve, in place of what served before, or nothing changes.

    An ensemble is loaded with the versions of its members that are loaded then, and again whenever
    these change. While they do not suit it, it is unloaded, and comes back once they do.
    """

    def __init__(
        self,
        table: ModelTable,
        repository: ModelRepository,
        loads: VersionLoads,
        running: ModelTasks,
        notify: Callable[[], None],
        threads: Threads,
    ) -> None:
        self._threads = threads
        self._table = table
        self._repository = repository
        self._loads = loads
        self._running = running
        self._notify = notify
        self._bindings = EnsembleMembers(table, repository, threads)
        self._locks: WeakValueDictionary[ModelId, asyncio.Lock] = WeakValueDictionary()
        self._waits = MemberWaits()

    async def load(self, model: ModelId, override: Override | None = None) -> None:
        """Load what a client asked for; it serves when this returns.

        Nothing happens if it serves already and its files are as they were. Raises InferenceError
        with Triton's texts; what served before then goes on.
        """
        await self._then_ripple(lambda changed: self._load(model, override, changed))

    async def follow(self, model: ModelId, snapshot: Snapshot | None = None) -> None:
        """Load the model's files, at the start or because they have changed.

        `snapshot` is the state of its folder if a poll has found it. Raises like `load`; the table
        keeps the failure.
        """
        await self._then_ripple(lambda changed: self._load_from_disk(model, snapshot, changed))

    async def _load(
        self, model: ModelId, override: Override | None, changed: list[ModelId]
    ) -> None:
        async with self._lock(model):
            try:
                source = await self._read(model, override=override)
            except InferenceError as error:
                log.error("model unreadable", extra=_extra(model, error))
                raise poll_failed(model.name, error.message) from None
            known = self._table.get_or_add(model)
            known.implicit = False
            with known.attempt():
                await self._apply(known, source, changed, again=True)

    async def _load_from_disk(
        self, model: ModelId, snapshot: Snapshot | None, changed: list[ModelId]
    ) -> None:
        async with self._lock(model):
            known = self._table.get_or_add(model)
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
                    known.seen = await self._scan(known.id)
                source = await self._read(known.id, seen=known.seen)
            except InferenceError as error:
                log.error("model unreadable", extra=_extra(known.id, error))
                self._note_unreadable(known, error)
                raise
            await self._apply(known, source, changed, again=again)

    async def _then_ripple(self, load: Callable[[list[ModelId]], Awaitable[None]]) -> None:
        """Load, and then the ensembles anew that call what that has changed."""
        changed: list[ModelId] = []
        try:
            await load(changed)
        except InferenceError:
            await self._ripple(changed)
            raise
        await self._ripple(changed)

    async def unload(self, model: ModelId, *, unload_dependents: bool = False) -> None:
        """Take a model away from lookups at once; it ends when its last request has.

        Models that need it go too, and with `unload_dependents` those that only it needed. If it
        is being loaded, that ends at once.
        """
        self._interrupt(model)
        async with self._lock(model):
            known = self._table.get(model)
            if known is None:
                return
            source = known.source
            self._drop(known, UNLOADED)
            known.members = ()
            known.suspend(None)
            if not known.versions:
                self._table.remove(model)
        await self._ripple([model])
        if unload_dependents and source is not None:
            for orphan in orphans(source.config, self._table):
                await self.unload(orphan.id, unload_dependents=True)

    def _interrupt(self, model: ModelId) -> None:
        known = self._table.get(model)
        if known is not None and known.loading is not None:
            known.loading.reschedule(asyncio.get_running_loop().time())
            known.loading = None

    def _lock(self, model: ModelId) -> asyncio.Lock:
        return self._locks.setdefault(model, asyncio.Lock())

    async def _scan(self, model: ModelId) -> Snapshot:
        return await read_folder(self._threads, model, self._repository.snapshot)

    async def _read(
        self, model: ModelId, *, override: Override | None = None, seen: Snapshot | None = None
    ) -> LoadSource:
        if override is None:
            source = partial(self._repository.source, snapshot=seen)
        else:
            source = partial(self._repository.overridden, override=override)
        return await read_folder(self._threads, model, source)

    def _note_unreadable(self, known: KnownModel, error: InferenceError) -> None:
        if error.message == IN_TWO_REPOSITORIES:
            self._drop(known, error.message)
        if not known.models:
            known.versions.clear()
            known.trouble, known.readable = _index_reason(error), False
        self._notify()

    async def _apply(
        self, known: KnownModel, source: LoadSource, changed: list[ModelId], *, again: bool
    ) -> None:
        """Make what is loaded what the source says, if it differs.

        `changed` gets it, and those members of an ensemble that had to be loaded: `again` also
        those whose last load has failed.
        """
        try:
            if is_served(known, source):
                return
            known.members = members(source.config)
            bound = await self._require(known, source, changed, again=again)
            await self._replace(known, source, bound)
            changed.append(known.id)
        except InferenceError:
            if known.members and known.source is None:
                known.suspend(source)
            raise
        finally:
            if source.upload is not None:
                source.upload.release()
            self._notify()

    async def _replace(self, known: KnownModel, source: LoadSource, bound: LoadedMembers) -> None:
        try:
            numbers = source.entry.versions(source.config.version_policy)
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
            await close_all(outcomes.values())
            raise load_failed(known.id.name, _clauses(errors))
        loaded = {n: each for n, each in outcomes.items() if not isinstance(each, InferenceError)}
        self._swap(known, source, loaded)
        known.bound = frozenset(bound.values())
        known.suspend(None)

    async def _load_versions(
        self, known: KnownModel, source: LoadSource, numbers: Sequence[int], bound: LoadedMembers
    ) -> Mapping[int, Loaded | InferenceError]:
        """Each version, or why it cannot be loaded: an `unload` does not wait for them."""
        try:
            async with asyncio.timeout(None) as known.loading:
                return await self._loads.load(
                    source, numbers, unchanged_versions(known, source), bound
                )
        except TimeoutError:
            return dict.fromkeys(numbers, INTERRUPTED)
        finally:
            known.loading = None

    # Ensembles.

    async def _require(
        self, known: KnownModel, source: LoadSource, changed: list[ModelId], *, again: bool
    ) -> LoadedMembers:
        """The members of an ensemble; those that it lacks are loaded. LoadFailure if one cannot."""
        try:
            for member in await self._bindings.members(known):
                needed = self._table.get_or_add(member)
                try:
                    with self._waits.entered(known.id, member):
                        await self._require_member(needed, changed, again=again)
                except InferenceError as error:
                    raise member_failed(known.id.name, needed, error) from None
            return self._bindings.bind(known.id, source.config)
        except InferenceError as error:
            self._note_invalid(known, error)
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
                raise known.failure.with_traceback(None)
            known.implicit = True
            await self._follow(known, changed, scan=True, again=again)

    def _note_invalid(self, known: KnownModel, error: InferenceError) -> None:
        if not known.models:
            known.trouble, known.readable = f"{Code.INVALID_ARG.value}: {cause(error)}", False

    async def _ripple(self, changed: Iterable[ModelId]) -> None:
        """Load anew the ensembles whose members have changed, and those that call these."""
        left = deque(changed)
        while left:
            name = left.popleft().name
            for needing in dependents(name, self._table):
                if await self._reconsider(needing.id):
                    left.append(needing.id)

    async def _reconsider(self, model: ModelId) -> bool:
        """Whether an ensemble has come, changed or gone, since its members did."""
        async with self._lock(model):
            known = self._table.get(model)
            source = None if known is None else known.source or known.suspended
            if known is None or source is None:
                return False
            try:
                bound = self._bindings.bind(model, source.config)
                if known.source is not None and known.bound == frozenset(bound.values()):
                    return False
                await self._replace(known, source, bound)
            except InferenceError as error:
                about = {"model": str(model), "reason": cause(error)}
                log.warning("ensemble out of service", extra=about)
                return self._suspend(known, source)
            finally:
                self._notify()
            return True

    def _suspend(self, known: KnownModel, source: LoadSource) -> bool:
        """Take an ensemble away until its members suit it again; whether it was there."""
        served = known.source is not None
        known.suspend(source)
        if served:
            self._drop(known, UNLOADED)
        return served

    # Changing the table.

    def _swap(self, known: KnownModel, source: LoadSource, loaded: Mapping[int, Loaded]) -> None:
        """In one plain step: from here on every request goes to what was loaded."""
        for number, status in known.versions.items():
            if not isinstance(loaded.get(number), InPlaceUpdate):
                self._retire(status, UNLOADED)
        for number, each in loaded.items():
            if isinstance(each, InPlaceUpdate):
                each.commit()
            else:
                known.versions[number] = VersionStatus(VersionState.READY, model=each)
                self._start(known, source, each)
        known.versions = dict(sorted(known.versions.items()))
        known.source = source

    def _start(self, known: KnownModel, source: LoadSource, model: Model) -> None:
        model.namespace = known.id.namespace
        if source.upload is not None:
            source.upload.hold()
        self._running.start(model, source.upload.release if source.upload else _nothing)

    def _drop(self, known: KnownModel, reason: str) -> None:
        for status in known.versions.values():
            self._retire(status, reason)
        known.source = known.seen = None
        known.bound = frozenset()
        known.trouble = ""
        self._notify()

    def _retire(self, status: VersionStatus, reason: str) -> None:
        """A version takes no more requests; once it has ended, the reason says why."""

        def ended() -> None:
            status.state, status.reason = VersionState.UNAVAILABLE, reason
            self._notify()

        if status.model is not None:
            model, status.model = status.model, None
            status.state = VersionState.UNLOADING
            self._running.retire(model, ended)
        elif status.state is not VersionState.UNLOADING:
            ended()


def _clauses(errors: Mapping[int, InferenceError]) -> str:
    return "".join(
        f"version {number} is at UNAVAILABLE state: {error.reason};"
        for number, error in sorted(errors.items())
    )


def _index_reason(error: InferenceError) -> str:
    return error.message if error.message == IN_TWO_REPOSITORIES else error.reason


def _extra(model: ModelId, error: InferenceError) -> Mapping[str, object]:
    return {"model": str(model), "reason": error.reason}


def _nothing() -> None:
    """Called when a model has been closed whose files are not ours to delete."""
