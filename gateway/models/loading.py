"""Loads of versions: each from its source to a Model with instances."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from gateway.backend import Backend, Instance, ModelContext, ModelControl
from gateway.backend_loader import IN_PYTHON, BackendLoader, refuse_replaced_methods
from gateway.cache.cache import ResponseCache
from gateway.config import InstanceKind, ModelConfig
from gateway.ensembles.backend import EnsembleBackend
from gateway.ensembles.graph import labels_of_members
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.models.closings import Closings
from gateway.models.fetching import Fetches
from gateway.models.golden.run import GoldenRun
from gateway.models.golden.similarity import Find
from gateway.models.instance_groups import (
    EVERY_CORE,
    InPlaceUpdate,
    InstanceSlot,
    Placement,
    check_memory,
    closed_on_error,
    cores_of,
    load_slots,
    match_slots,
    placements,
    register_slots,
)
from gateway.models.kept_facts import VersionFiles
from gateway.models.limits import drops_weights, is_cached, shares_memory
from gateway.models.load_identity import private_load, rescanned, shared_load
from gateway.models.model import Model, import_scheduler
from gateway.models.model_folder import files_folder, read_labels
from gateway.models.normalisation import completed
from gateway.models.repository import LoadSource
from gateway.models.reshaped_instance import with_reshapes
from gateway.models.residents import Residents
from gateway.observability.log import logged_stage
from gateway.observability.statistics import ModelStatistics
from gateway.policy.tenants import Tenants
from gateway.schedulers.rate_limiter import ExecutionLimiter
from gateway.settings import ModelSettings
from gateway.stream import ResponseStream
from gateway.threads import Threads

log = logging.getLogger("sluice.loads")

Infer = Callable[[InferRequest], ResponseStream]
LoadedMembers = Mapping[tuple[str, int], Model]
"""The models that an ensemble calls, by the name and version in its steps."""
NO_MEMBERS: LoadedMembers = MappingProxyType({})


Loaded = Model | InPlaceUpdate
"""A newly loaded version, or an in-place update of a loaded one."""


@dataclass(frozen=True, slots=True)
class SharedParts:
    """Parts of the server that all models share.

    `find` finds loaded models. Loads block in `threads`, requests in `request_threads`; `closings`
    close instances, `residents` share the memory, and `tenants` the models, if there are any.
    """

    cache: ResponseCache | None
    control: ModelControl | None
    find: Find
    closings: Closings
    threads: Threads
    request_threads: Threads
    residents: Residents
    tenants: Tenants | None = None


class ModelLoader:
    """Loads versions, at most `load_thread_count` concurrently in the whole server.

    A wait for files or for room in memory takes no place among them. A failed load of a version is
    repeated up to `load_retry_count` times.
    """

    def __init__(
        self, backends: BackendLoader, settings: ModelSettings, infer: Infer, shared: SharedParts
    ) -> None:
        self._threads = shared.threads
        self._request_threads = shared.request_threads
        self._backends = backends
        self._settings = settings
        self._infer = infer
        self._cache = shared.cache
        self._shared = shared
        self._residents, self._tenants = shared.residents, shared.tenants
        self._limiter = ExecutionLimiter(settings.resource_limits) if settings.rate_limit else None
        self._at_once = asyncio.Semaphore(settings.load_thread_count)
        self._fetches = Fetches()
        self._retries = settings.load_retry_count

    async def load_versions(
        self,
        source: LoadSource,
        versions: Sequence[int],
        kept: Mapping[int, Model],
        members: LoadedMembers,
        served: Collection[Model],
    ) -> Mapping[int, Loaded | InferenceError]:
        """Each version, or its error. If cancelled, nothing stays loaded.

        Of the versions `served` before, those in `kept` only get the instance groups of the source.
        `members` are the models that an ensemble calls; a failed load with members is not retried.
        """
        outcomes: dict[int, Loaded | InferenceError] = {}
        stay = {n: kept[n] for n in versions if n in kept and not _must_reload(kept[n], source)}
        replaced = [each for each in served if each not in stay.values()]

        async def load_one(version: int) -> None:
            begin: Callable[[], Awaitable[Loaded]]
            if version in stay:
                begin = partial(self.update, stay[version], source, members)
            else:
                load = partial(
                    self.load, members=members, replaced=replaced, may_begin_asleep=not served
                )
                begin = partial(self._load_fetched, source, version, load)
            for _ in range(1 if members else 1 + self._retries):
                outcomes[version] = await _loaded_or_error(begin, source.config.name, version)
                if not isinstance(outcomes[version], InferenceError):
                    break

        try:
            async with asyncio.TaskGroup() as tasks:
                for version in versions:
                    tasks.create_task(load_one(version))
        except BaseException:
            await self.close(outcomes.values())
            raise
        return outcomes

    async def close(self, outcomes: Iterable[Loaded | InferenceError]) -> None:
        """Close loaded versions that will not serve; all of them, even if cancelled."""
        try:
            await close_all(outcomes)
        finally:
            for each in outcomes:
                if isinstance(each, Model):
                    self._residents.end(each)

    async def _load_fetched(
        self, source: LoadSource, version: int, load: Callable[[LoadSource, int], Awaitable[Model]]
    ) -> Model:
        """Load a version; if it is in object storage, fetch it first."""
        log.info("loading model", extra={"model": source.config.name, "version": version})
        if isinstance(source.entry.files, Path):
            return await load(source, version)
        async with self._fetches.fetch(source, version) as fetched:
            return await load(fetched, version)

    async def load(
        self,
        source: LoadSource,
        version: int,
        members: LoadedMembers = NO_MEMBERS,
        replaced: Collection[Model] = (),
        *,
        may_begin_asleep: bool = True,
    ) -> Model:
        """A version of the source: its instances loaded, warm, and known to its scheduler.

        `members` are the models that an ensemble calls; the caller holds them meanwhile. `replaced`
        are the versions that end once it serves. A version that may sleep has no instances yet if
        it has no golden requests and `may_begin_asleep`. Raises InferenceError with the reason;
        nothing stays loaded then.
        """
        about = {"model": source.config.name, "version": version}
        async with self._at_once:
            began = time.monotonic()
            if source.tree is None and self._shares_responses(source.config):
                # The scan of a poll may be older than the files that this load reads.
                source = await self._threads.run(rescanned, source)
            folder = await self._threads.run(self._folder, source, version)
            with logged_stage(log, "backend imported", **about):
                backend = await self._backend(source.config, members)
            config = _with_runtime(source.config, backend)
            with logged_stage(log, "environment prepared", **about):
                await backend.prepare(config, folder)
            config = await self._threads.run(self._complete, backend, config, folder)
            golden = await self._threads.run(self._golden, config, source, version)
            await self._threads.run(import_scheduler, config)
            labels = {
                **labels_of_members(config, members),
                **await self._threads.run(read_labels, config, source.folder),
            }
            statistics = ModelStatistics.of(config, summaries=self._settings.summaries)
            slots = self._slots(backend, config, folder, statistics)
            model = Model(config, version, statistics, slots, labels, source.folder, self._tenants)
            model.members = tuple(dict.fromkeys(members.values()))
            model.tree = source.tree
            if source.tree is not None:
                model.when_closed(source.tree.release)
            await self._use_cache(model, source, folder)
            model.instances.side_by_side = backend.loads_side_by_side
            if golden is not None and drops_weights(config):
                for slot in slots:
                    if not slot.passive:
                        slot.check_woken = partial(golden.check_woken, slot)
            files = VersionFiles(folder, partial(shared_load, source, config, version, folder))
            may_sleep = shares_memory(config, self._settings.memory) and (
                await self._residents.admit(model, files, replaced)
            )
            secs = time.monotonic() - began
        limiter = None if members else self._limiter
        if may_sleep and may_begin_asleep and golden is None:
            register_slots(slots, limiter)
            model.instances.begin_asleep()
            model.loaded_at = time.time()
            return model
        waits = model.waking is not None
        room = self._residents.room(model, self._at_once) if waits else self._at_once
        async with room, closed_on_error(slots):
            began = time.monotonic()
            register_slots(slots, limiter)
            with logged_stage(log, "instances loaded", **about, count=len(slots)):
                await load_slots(slots, side_by_side=backend.loads_side_by_side)
            with logged_stage(log, "instances warmed up", **about):
                await _prepare(model, slots, golden)
            if may_sleep:
                await self._residents.filled(model)
            else:
                model.load_secs = secs + time.monotonic() - began
        model.loaded_at = time.time()
        return model

    async def update(
        self, model: Model, source: LoadSource, members: LoadedMembers = NO_MEMBERS
    ) -> InPlaceUpdate:
        """Load the instances that a loaded version lacks for the source's instance groups.

        Instances that fit are kept. `members` are the models that an ensemble calls. Raises
        InferenceError; nothing new stays loaded then.
        """
        groups, policy = source.config.instance_group, source.config.version_policy
        config = replace(model.config, instance_group=groups, version_policy=policy)
        own = replace(source, tree=model.tree)
        folder = await self._threads.run(self._folder, own, int(model.version))
        backend = await self._backend(config, members)
        golden = await self._threads.run(self._golden, config, own, int(model.version))
        wanted = self._slots(backend, config, folder, model.statistics)
        kept = match_slots(wanted, model.instances.slots)
        update = InPlaceUpdate(model.exchange, config, wanted, kept)
        register_slots(update.added, None if members else self._limiter)
        async with self._at_once, closed_on_error(update.added):
            await load_slots(update.added, side_by_side=backend.loads_side_by_side)
            await _prepare(model, update.added, golden)
        return update

    def _golden(self, config: ModelConfig, source: LoadSource, version: int) -> GoldenRun | None:
        """The golden requests that new instances of a version must answer, if there are any."""
        run = GoldenRun(config.name, version, self._settings.golden, self._shared.find)
        return run if run.read(config, source.folder) else None

    async def _use_cache(self, model: Model, source: LoadSource, folder: Path) -> None:
        """Cache the model's responses if the server and the config enable it."""
        if self._cache is None or not is_cached(model.config):
            return
        identify = shared_load if self._shares_responses(model.config) else private_load
        load = await self._threads.run(identify, source, model.config, int(model.version), folder)
        model.use_cache(self._cache, load, self._request_threads)

    def _shares_responses(self, config: ModelConfig) -> bool:
        """Whether other processes use its cached responses.

        An ensemble's responses also depend on files of its members.
        """
        shared = self._cache is not None and self._cache.shared and is_cached(config)
        return shared and config.ensemble_scheduling is None

    async def _backend(self, config: ModelConfig, members: LoadedMembers) -> Backend:
        if config.ensemble_scheduling is not None:
            return EnsembleBackend(members)
        return await self._threads.run(self._backends.of, config)

    def _folder(self, source: LoadSource, version: int) -> Path:
        """The folder of the version's files."""
        return files_folder(source.config, source.folder / str(version), self._settings.store)

    def _complete(self, backend: Backend, config: ModelConfig, folder: Path) -> ModelConfig:
        if not self._settings.auto_complete and config.ensemble_scheduling is None:
            return config
        return completed(config, backend.complete(config, folder))

    def _slots(
        self, backend: Backend, config: ModelConfig, folder: Path, statistics: ModelStatistics
    ) -> list[InstanceSlot]:
        context = partial(self._context, backend, config, folder, statistics)
        return [
            InstanceSlot(
                *(partial(self._fill, backend, context(placement)), placement),
                closings=self._shared.closings,
            )
            for placement in placements(config)
        ]

    async def _fill(self, backend: Backend, context: ModelContext) -> Instance:
        if context.group.kind is InstanceKind.KIND_GPU:
            limits = self._settings.gpus.memory_limits
            await self._threads.run(check_memory, context.config.name, context.device, limits)
        instance = await backend.load(context)
        try:
            refuse_replaced_methods(instance, Instance)
        except InferenceError:
            await self._shared.closings.close(instance, context.name)
            raise
        return with_reshapes(instance, context.config)

    def _context(
        self,
        backend: Backend,
        config: ModelConfig,
        folder: Path,
        statistics: ModelStatistics,
        placement: Placement,
    ) -> ModelContext:
        policies = self._settings.host_policies
        composed = config.ensemble_scheduling is not None

        def infer(request: InferRequest) -> ResponseStream:
            statistics.calls += 1
            return self._infer(request)

        return ModelContext(
            config=config,
            name=placement.name,
            group=placement.group,
            device=placement.device,
            cpu_cores=EVERY_CORE if composed else cores_of(placement, config, backend, policies),
            path=folder,
            store=self._settings.store,
            infer=infer,
            control=self._shared.control,
            wasted=statistics.waste,
        )


def _with_runtime(config: ModelConfig, backend: Backend) -> ModelConfig:
    """The config with its runtime: Triton sets it for a Python-based backend."""
    return config if backend.home is None else replace(config, runtime=IN_PYTHON)


async def _prepare(model: Model, slots: Sequence[InstanceSlot], golden: GoldenRun | None) -> None:
    await model.prepare(slots)
    if golden is not None:
        await golden.check(slots)
        model.golden = (*model.golden, *golden.results)


def _must_reload(kept: Model, source: LoadSource) -> bool:
    """Whether a version that sleeps has other instance groups: a load may be under way."""
    changed = kept.config.instance_group != source.config.instance_group
    return changed and kept.waking is not None


async def close_all(outcomes: Iterable[Loaded | InferenceError]) -> None:
    """Close loaded versions that will not serve; all of them, even if cancelled."""
    ends = [each.close() for each in outcomes if not isinstance(each, InferenceError)]
    await asyncio.gather(*ends)


async def _loaded_or_error(
    begin: Callable[[], Awaitable[Loaded]], model: str, version: int
) -> Loaded | InferenceError:
    extra: dict[str, object] = {"model": model, "version": version}
    began = time.monotonic()
    try:
        loaded = await begin()
    except InferenceError as error:
        return _logged(error, extra)
    except Exception:
        # Around one model load: a runtime's own exception must not end the other loads.
        log.exception("loading failed", extra=extra)
        text = "loading failed unexpectedly; the server's log says why"
        return _logged(InferenceError(Code.INTERNAL, text), extra)
    if isinstance(loaded, InPlaceUpdate):
        log.info("version kept", extra=extra | {"added": len(loaded.added)})
    else:
        log.info("model ready", extra=extra | {"secs": round(time.monotonic() - began, 1)})
    return loaded


def _logged(error: InferenceError, extra: Mapping[str, object]) -> InferenceError:
    log.error("model load failed", extra={**extra, "reason": error.reason})
    return error
