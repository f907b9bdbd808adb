"""The registry of known models: states of versions, labels and look-ups, with Triton's texts."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models.model import Model
from gateway.models.model_folder import Snapshot, by_version, requested_version, without_golden
from gateway.models.repository import LoadSource, ModelId

UNLOADED = "unloaded"
STABLE = "stable"
"""The label of the version for requests that name none."""


class VersionState(StrEnum):
    """States of a version (model repository extension)."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True)
class VersionStatus:
    """The state of one version; `model` is set while the state is READY.

    A rollout has `refused` a version that was not loaded: the server is ready without it.
    """

    state: VersionState
    reason: str = ""
    model: Model | None = None
    refused: bool = False

    @property
    def ready(self) -> bool:
        """Whether the version serves requests at this moment."""
        return self.model is not None and self.model.ready

    @property
    def wanted(self) -> bool:
        """Whether the version should serve requests: no unload has ended it."""
        if self.refused or self.state is VersionState.UNLOADING:
            return False
        return self.reason != UNLOADED

    @property
    def trouble(self) -> str:
        """The reason why the version does not serve requests."""
        return (self.model.trouble if self.model else self.reason) or self.state.value

    @property
    def error(self) -> InferenceError:
        """The error of a load that has left the version out."""
        return InferenceError(Code.UNAVAILABLE, self.trouble)


@dataclass(slots=True)
class KnownModel:
    """One model of the registry: its versions, ascending, and the source of their last load.

    `seen` is the state of its folder at the last attempt to load it. `loading` is the timeout of
    the attempt under way. `trouble` is the reason if the model has no version; `readable` is False
    if its configuration is the reason. `implicit`: it was loaded only as a member of an ensemble.
    `attempts` counts loads, and `failure` is the error of the last one.

    Of an ensemble, `members` are the names of its models and `bound` the versions that it was
    loaded with. `suspended` is the source for its next load while its members do not suit it.

    `labels` are names of versions. The versions `held` are loaded, also if the policy does not
    select them.
    """

    id: ModelId
    versions: dict[int, VersionStatus] = field(default_factory=dict)
    source: LoadSource | None = None
    seen: Snapshot | None = None
    loading: asyncio.Timeout | None = None
    trouble: str = ""
    readable: bool = True
    implicit: bool = False
    attempts: int = 0
    failure: InferenceError | None = None
    members: tuple[str, ...] = ()
    bound: frozenset[Model] = frozenset()
    suspended: LoadSource | None = None
    labels: dict[str, int] = field(default_factory=dict)
    held: frozenset[int] = frozenset()

    @property
    def chosen(self) -> frozenset[int] | None:
        """The versions that a client has chosen in place of those of the policy; None if none."""
        return None if self.source is None else self.source.chosen

    @property
    def loaded(self) -> frozenset[int]:
        """The numbers of the loaded versions."""
        return frozenset(int(model.version) for model in self.models)

    @property
    def models(self) -> list[Model]:
        """The loaded versions, ascending."""
        return [status.model for status in self.versions.values() if status.model is not None]

    @property
    def stable(self) -> Model | None:
        """The loaded version with the label `stable`."""
        status = self.versions.get(self.labels[STABLE]) if STABLE in self.labels else None
        return None if status is None else status.model

    @property
    def wanted(self) -> bool:
        """Whether a version should serve requests."""
        return any(status.wanted for status in self.versions.values())

    @property
    def of_fleet(self) -> bool:
        """Whether replicas host it: it is in no repository of this server."""
        return bool(self.models) and all(model.of_fleet for model in self.models)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Count one attempt to load the model, and keep its error."""
        self.attempts += 1
        self.failure = None
        try:
            yield
        except InferenceError as error:
            self.failure = error.again()
            raise

    def serves(self, source: LoadSource) -> bool:
        """Whether the versions of the source, and no others, serve from the same files."""
        served = self.source
        if served is None or source.overridden or served.overridden:
            return False
        same = without_golden(served.snapshot) == without_golden(source.snapshot)
        if not same or not all(model.ready for model in self.models):
            return False
        return self.loaded == set(self.wanted_versions(source))

    def wanted_versions(self, source: LoadSource) -> tuple[int, ...]:
        """The versions that a load of the source serves, ascending; INVALID_ARG if none."""
        wanted = source.selected | self.held
        found = tuple(each for each in source.entry.available if each in wanted)
        entry = replace(source.entry, available=source.available)
        return found or entry.versions(source.config.version_policy)

    def choosing(self, source: LoadSource, versions: frozenset[int]) -> LoadSource:
        """The source with versions that a client loads besides those that serve.

        A changed policy ends the choice of before.
        """
        served = self.source
        if served is None:
            return replace(source, chosen=versions)
        is_same = served.config.version_policy == source.config.version_policy
        return replace(source, chosen=versions | (served if is_same else source).selected)

    def unchanged_versions(
        self, source: LoadSource, bound: frozenset[Model]
    ) -> Mapping[int, Model]:
        """The loaded versions that need at most other instances (in-place update).

        `bound` are the versions that an ensemble calls now. None is kept for a client's config that
        is equal to the served one: it asks for a reload.
        """
        served = self.source
        if served is None or served.upload or source.upload or bound != self.bound:
            return {}
        if source.overridden and source.config == served.config:
            return {}
        if _without_instances(source.config) != _without_instances(served.config):
            return {}
        before, now = by_version(served.snapshot), by_version(source.snapshot)
        if before[None] != now[None]:
            return {}
        loaded = {int(model.version): model for model in self.models if model.ready}
        return {n: model for n, model in loaded.items() if before.get(n) == now.get(n)}

    def begin_loading(self, numbers: Iterable[int]) -> None:
        """Show versions as LOADING; those that are loaded stay READY."""
        for number in numbers:
            status = self.versions.get(number)
            if status is None or status.model is None:
                self.versions[number] = VersionStatus(VersionState.LOADING)
        self.versions = dict(sorted(self.versions.items()))

    def fail_loading(self, errors: Mapping[int, InferenceError]) -> None:
        """Show versions as UNAVAILABLE that were LOADING; those without an error as unloaded."""
        for number, status in self.versions.items():
            if status.state is VersionState.LOADING:
                status.state = VersionState.UNAVAILABLE
                status.reason = errors[number].reason if number in errors else UNLOADED

    def keep_members(self, why: str) -> None:
        """Show that an ensemble serves with the members that it had, and why."""
        for status in self.versions.values():
            if status.model is not None:
                status.reason = f"bound to the members before their reload: {why}"

    def suspend(self, source: LoadSource | None) -> None:
        """Keep the source of an ensemble until its members suit it; None keeps no source."""
        before, self.suspended = self.suspended, source
        if source is not None and source.upload is not None:
            source.upload.hold()
        if before is not None and before.upload is not None:
            before.upload.release()

    @property
    def shown(self) -> bool:
        """Whether requests can tell the model from one that does not exist."""
        return bool(self.versions) or (self.readable and bool(self.trouble))


def members(config: ModelConfig) -> tuple[str, ...]:
    """The names of the models that an ensemble's steps call; none for other models."""
    steps = config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()
    return tuple(dict.fromkeys(step.model_name for step in steps))


def _without_instances(config: ModelConfig) -> ModelConfig:
    return replace(config, instance_group=(), version_policy=None)


class ModelRegistry:
    """All known models by name; only synchronous functions change it."""

    def __init__(self) -> None:
        self._known: dict[ModelId, KnownModel] = {}
        self._named: dict[str, list[KnownModel]] = {}
        self._settled = asyncio.Event()
        self.changes = 0
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[KnownModel]:
        return iter(sorted(self._known.values(), key=lambda known: known.id))

    def get(self, model: ModelId) -> KnownModel | None:
        """The model if it is known."""
        return self._known.get(model)

    def get_or_add(self, model: ModelId) -> KnownModel:
        """The model; an unknown model is added without versions."""
        if model not in self._known:
            self._known[model] = KnownModel(model)
            self._named.setdefault(model.name, []).append(self._known[model])
        return self._known[model]

    def remove(self, model: ModelId) -> None:
        """Remove a known model."""
        self._named[model.name].remove(self._known.pop(model))

    def named(self, name: str) -> list[KnownModel]:
        """The models of a name; several exist only with namespaces."""
        return [known for known in self._named.get(name, ()) if known.shown]

    def models(self) -> Iterator[Model]:
        """Every loaded version, ordered by name and version."""
        for known in self:
            yield from known.models

    def find(self, name: str, version: str) -> Model:
        """The named version; for "" the version `stable`, the highest ready or loaded version.

        A version is a number or a label; a name may end in `@label`. Raises InferenceError with
        Triton's lookup texts: NOT_FOUND, UNAVAILABLE, INVALID_ARG.
        """
        found = self._named.get(name)
        if found is not None and len(found) == 1 and found[0].versions:
            known = found[0]
        else:
            plain, label = self.address(name, version)
            if plain != name:
                return self.find(plain, label)
            known = self.only(name)
        if version:
            return _numbered(known, version)
        return _preferred(known) if known.labels else _highest(known)

    def address(self, name: str, version: str = "") -> tuple[str, str]:
        """The model and the version that a name means; `m@label` is that label of the model `m`.

        A model of the whole name comes first.
        """
        plain, at, label = name.rpartition("@")
        if not at or version or self.named(name) or not self.has_label(plain, label):
            return name, version
        return plain, label

    def has_label(self, name: str, label: str) -> bool:
        """Whether a model has a version of that label."""
        return any(label in known.labels for known in self.named(name))

    def only(self, name: str) -> KnownModel:
        """The model of a name, loaded or failed; raises as `find` if there is not exactly one."""
        found = self.named(name)
        if not found:
            raise self.absent(name)
        if len(found) > 1:
            raise InferenceError(
                Code.INVALID_ARG,
                f"There are {len(found)} identifiers of model '{name}' in global map, model "
                "namespace must be provided to resolve ambiguity.",
            )
        return found[0]

    def absent(self, name: str) -> InferenceError:
        """The error of a look-up of a name that no model has."""
        if not self.settled:
            return InferenceError(Code.UNAVAILABLE, "Server not ready")
        return _refusal(Code.NOT_FOUND, f"'{name}' is not found")

    def ready_versions(self, name: str) -> list[Model]:
        """The ready versions of a model, lowest first."""
        return [model for known in self.named(name) for model in known.models if model.ready]

    def failures(self) -> Mapping[str, str]:
        """The reason for each version that is not ready, by `name` or `name version N`."""
        found = {str(known.id): known.trouble for known in self if known.trouble}
        for known in self:
            for number, status in known.versions.items():
                if status.wanted and not status.ready:
                    found[f"{known.id} version {number}"] = status.trouble
        return found

    # Changes.

    @property
    def settled(self) -> bool:
        """Whether each start-up model has been loaded or has failed."""
        return self._settled.is_set()

    def settle(self) -> None:
        """Note that each start-up model has been loaded or has failed."""
        self._settled.set()
        self.notify()

    async def wait_settled(self) -> None:
        """Wait until each start-up model has been loaded or has failed."""
        await self._settled.wait()

    async def changed(self) -> None:
        """Wait until the readiness of a model may have changed."""
        await self._changed.wait()

    def notify(self) -> None:
        """Wake the tasks that wait in `changed`, and count the change."""
        self.changes += 1
        self._changed.set()
        self._changed = asyncio.Event()


def _refusal(code: Code, text: str) -> InferenceError:
    return InferenceError(code, f"Request for unknown model: {text}")


def _preferred(known: KnownModel) -> Model:
    """The version of a request that names none: `stable` if it is able, else the highest."""
    model = known.stable
    able = model is not None and model.instances.ready and model.takes_requests
    return model if model is not None and able else _highest(known)


def _highest(known: KnownModel) -> Model:
    loaded, is_only = None, len(known.versions) == 1
    for status in reversed(known.versions.values()):
        model = status.model
        if model is not None and model.instances.ready and (is_only or model.takes_requests):
            return model
        loaded = loaded or model
    if loaded is not None:
        return loaded
    if any(status.state is VersionState.LOADING for status in known.versions.values()):
        raise _refusal(Code.UNAVAILABLE, f"'{known.id.name}' is still loading")
    raise _refusal(Code.NOT_FOUND, f"'{known.id.name}' has no available versions")


def _numbered(known: KnownModel, version: str) -> Model:
    labelled = known.labels.get(version) if known.labels else None
    status = known.versions.get(requested_version(version) if labelled is None else labelled)
    if status is not None and status.model is not None:
        return status.model
    name = known.id.name
    if labelled is not None:
        text = f"label '{version}' of model '{name}' is version {labelled}, which is not loaded"
        raise InferenceError(Code.UNAVAILABLE, text)
    if status is None:
        raise _refusal(Code.NOT_FOUND, f"'{name}' version {version} is not found")
    raise _refusal(Code.UNAVAILABLE, f"'{name}' version {version} is not at ready state")
