"""From the source of a model and a version to a loaded Model."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from gateway.backend import Backend, Instance, ModelContext, ModelControl
from gateway.backend_loader import IN_PYTHON, BackendLoader
from gateway.cache.cache import ResponseCache
from gateway.config import InstanceKind, ModelConfig
from gateway.ensembles.backend import EnsembleBackend
from gateway.messages import InferRequest
from gateway.models.closings import Closings
from gateway.models.completion import completed
from gateway.models.gpus import check_memory
from gateway.models.host_policies import EVERY_CORE, cores_of
from gateway.models.labels import Labels, read_labels
from gateway.models.load_identity import private_load, shared_load
from gateway.models.model import Model
from gateway.models.repository import Source
from gateway.models.reshaped_instance import with_reshapes
from gateway.models.slots import Place, Slot, empty, enrol, fill, match, places
from gateway.models.stored import files_folder
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.rate_limiter import ExecutionLimiter
from gateway.settings import ModelSettings
from gateway.stream import ResponseStream
from gateway.threads import Threads

Infer = Callable[[InferRequest], ResponseStream]
LoadedMembers = Mapping[tuple[str, int], Model]
"""The models that an ensemble calls, by the name and the version that its steps ask for."""
NO_MEMBERS: LoadedMembers = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class InPlaceUpdate:
    """A loaded version with other instances (in-place update): `kept` are its own that fit.

    Nobody notices before `commit`; `close` is for one that will not be.
    """

    model: Model
    config: ModelConfig
    wanted: Sequence[Slot]
    kept: Sequence[Slot | None]

    @property
    def added(self) -> list[Slot]:
        """The slots that had to be filled."""
        return [slot for slot, old in zip(self.wanted, self.kept, strict=True) if old is None]

    def commit(self) -> None:
        """Serve with the new set; instances that are not in it end with what they execute."""
        for slot, old in zip(self.wanted, self.kept, strict=True):
            if old is not None:
                old.place, old.load = slot.place, slot.load
        slots = [old or slot for slot, old in zip(self.wanted, self.kept, strict=True)]
        self.model.exchange(self.config, slots)

    def close(self) -> Awaitable[object]:
        """Begin to close what was loaded; await the end."""
        return empty(self.added)


@dataclass(frozen=True, slots=True)
class Shared:
    """Parts of the server that all of its models share.

    Loads block in `threads`, requests in `request_threads`, and instances end in `closings`.
    """

    cache: ResponseCache | None
    control: ModelControl | None
    closings: Closings
    threads: Threads
    request_threads: Threads


class ModelLoader:
    """Loads one version at a time."""

    def __init__(
        self, backends: BackendLoader, settings: ModelSettings, infer: Infer, shared: Shared
    ) -> None:
        self._threads = shared.threads
        self._request_threads = shared.request_threads
        self._backends = backends
        self._settings = settings
        self._infer = infer
        self._cache = shared.cache
        self._control = shared.control
        self._closings = shared.closings
        self._limiter = ExecutionLimiter(settings.resource_limits) if settings.rate_limit else None

    async def load(
        self, source: Source, version: int, members: LoadedMembers = NO_MEMBERS
    ) -> Model:
        """That version of the source: all its instances loaded, warm, and known to its scheduler.

        `members` are the models that an ensemble calls: somebody holds them meanwhile.
        Raises InferenceError that says why not; nothing stays loaded then.
        """
        began = time.monotonic()
        folder = await self._threads.run(self._folder, source, version)
        backend = await self._backend(source.config, members)
        config = _with_runtime(source.config, backend)
        await backend.prepare(config, folder)
        config = await self._threads.run(self._complete, backend, config, folder)
        own_labels = await self._threads.run(read_labels, config, source.folder)
        labels = {**_labels_of_members(config, members), **own_labels}
        statistics = ModelStatistics.of(config, summaries=self._settings.summaries)
        slots = self._slots(backend, config, folder, statistics)
        model = Model(config, version, statistics, slots, labels, source.folder)
        model.members = tuple(dict.fromkeys(members.values()))
        await self._keep_answers(model, source, folder)
        enrol(slots, None if members else self._limiter)
        await fill(slots, side_by_side=backend.loads_side_by_side)
        await _prepare(model, slots)
        model.load_secs = time.monotonic() - began
        model.loaded_at = time.time()
        return model

    async def update(self, model: Model, source: Source) -> InPlaceUpdate:
        """Load what a loaded version lacks to have the instance groups of the source.

        Instances that fit are kept. Raises InferenceError; nothing new stays loaded then.
        """
        groups, policy = source.config.instance_group, source.config.version_policy
        config = replace(model.config, instance_group=groups, version_policy=policy)
        folder = await self._threads.run(self._folder, source, int(model.version))
        backend = await self._threads.run(self._backends.of, config)
        wanted = self._slots(backend, config, folder, model.statistics)
        update = InPlaceUpdate(model, config, wanted, match(wanted, model.slots))
        enrol(update.added, self._limiter)
        await fill(update.added, side_by_side=backend.loads_side_by_side)
        await _prepare(model, update.added)
        return update

    async def _keep_answers(self, model: Model, source: Source, folder: Path) -> None:
        """Have the cache keep the model's answers, if both the server and the config say so."""
        asked = model.config.response_cache
        if self._cache is None or asked is None or not asked.enable:
            return
        # What an ensemble answers depends on files of its members, too.
        shared = self._cache.shared and model.config.ensemble_scheduling is None
        identify = shared_load if shared else private_load
        load = await self._threads.run(identify, source, model.config, folder)
        model.use_cache(self._cache, load, self._request_threads)

    async def _backend(self, config: ModelConfig, members: LoadedMembers) -> Backend:
        if config.ensemble_scheduling is not None:
            return EnsembleBackend(members)
        return await self._threads.run(self._backends.of, config)

    def _folder(self, source: Source, version: int) -> Path:
        """Where the version's files are."""
        return files_folder(source.config, source.folder / str(version), self._settings.store)

    def _complete(self, backend: Backend, config: ModelConfig, folder: Path) -> ModelConfig:
        if not self._settings.auto_complete and config.ensemble_scheduling is None:
            return config
        return completed(config, backend.complete(config, folder))

    def _slots(
        self, backend: Backend, config: ModelConfig, folder: Path, statistics: ModelStatistics
    ) -> list[Slot]:
        context = partial(self._context, backend, config, folder, statistics)
        return [
            Slot(partial(self._fill, backend, context(place)), place, closings=self._closings)
            for place in places(config)
        ]

    async def _fill(self, backend: Backend, context: ModelContext) -> Instance:
        if context.group.kind is InstanceKind.KIND_GPU:
            limits = self._settings.gpus.memory_limits
            await self._threads.run(check_memory, context.config.name, context.device, limits)
        return with_reshapes(await backend.load(context), context.config)

    def _context(
        self,
        backend: Backend,
        config: ModelConfig,
        folder: Path,
        statistics: ModelStatistics,
        place: Place,
    ) -> ModelContext:
        policies = self._settings.host_policies
        composed = config.ensemble_scheduling is not None
        return ModelContext(
            config=config,
            name=place.name,
            group=place.group,
            device=place.device,
            cpu_cores=EVERY_CORE if composed else cores_of(place, config, backend, policies),
            path=folder,
            store=self._settings.store,
            infer=self._infer,
            control=self._control,
            wasted=statistics.waste,
        )


def _with_runtime(config: ModelConfig, backend: Backend) -> ModelConfig:
    """Of a Python-based backend the config in force says so, as on Triton."""
    return config if backend.home is None else replace(config, runtime=IN_PYTHON)


async def _prepare(model: Model, slots: Sequence[Slot]) -> None:
    try:
        await model.prepare(slots)
    except BaseException:
        await empty(slots)
        raise


def _labels_of_members(config: ModelConfig, members: LoadedMembers) -> Labels:
    """Those that an ensemble's outputs have already where members make them."""
    if config.ensemble_scheduling is None:
        return {}
    found = {}
    outputs = {each.name for each in config.output}
    for step in config.ensemble_scheduling.step:
        labels = members[step.model_name, step.model_version].labels
        for output, tensor in step.output_map.items():
            if tensor in outputs and output in labels:
                found[tensor] = labels[output]
    return found
