"""The table of known models: states of versions, look-ups and index, with Triton's texts."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.errors import Code, InferenceError
from gateway.models.model import Model
from gateway.models.model_folder import Snapshot
from gateway.models.repository import LoadSource, ModelId

UNLOADED = "unloaded"


class VersionState(StrEnum):
    """States of a version (model repository extension)."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True)
class VersionStatus:
    """The state of one version; `model` is set while the state is READY."""

    state: VersionState
    reason: str = ""
    model: Model | None = None

    @property
    def ready(self) -> bool:
        """Whether the version serves requests at this moment."""
        return self.model is not None and self.model.ready

    @property
    def wanted(self) -> bool:
        """Whether the version should serve requests: no unload has ended it."""
        return self.state is not VersionState.UNLOADING and self.reason != UNLOADED

    @property
    def trouble(self) -> str:
        """The reason why the version does not serve requests."""
        return (self.model.trouble if self.model else self.reason) or self.state.value


@dataclass(slots=True)
class KnownModel:
    """One model of the table: its versions, ascending, and the source of their last load.

    `seen` is the state of its folder at the last attempt to load it. `loading` is the timeout of
    the attempt under way. `trouble` is the reason if the model has no version; `readable` is False
    if its configuration is the reason. `implicit`: it was loaded only as a member of an ensemble.
    `attempts` counts loads, and `failure` is the error of the last one.

    Of an ensemble, `members` are the names of its models and `bound` the versions that it was
    loaded with. `suspended` is the source for its next load while its members do not suit it.
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

    @property
    def models(self) -> list[Model]:
        """The loaded versions, ascending."""
        return [status.model for status in self.versions.values() if status.model is not None]

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Count one attempt to load the model, and keep its error."""
        self.attempts += 1
        self.failure = None
        try:
            yield
        except InferenceError as error:
            self.failure = error
            raise

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


class ModelTable:
    """All known models by name; only synchronous functions change it."""

    def __init__(self) -> None:
        self._known: dict[ModelId, KnownModel] = {}
        self._named: dict[str, list[KnownModel]] = {}

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

    def find(self, name: str, version: str) -> Model | None:
        """The named version; for "" the highest ready version, else the highest loaded version.

        None if the model is unknown. Raises InferenceError with Triton's lookup texts: NOT_FOUND,
        UNAVAILABLE, INVALID_ARG.
        """
        found = self._named.get(name, [])
        if len(found) != 1:
            found = self.named(name)
        if not found or not found[0].shown:
            return None
        if len(found) > 1:
            raise InferenceError(
                Code.INVALID_ARG,
                f"There are {len(found)} identifiers of model '{name}' in global map, model "
                "namespace must be provided to resolve ambiguity.",
            )
        return _numbered(found[0], version) if version else _highest(found[0])

    def failures(self) -> Mapping[str, str]:
        """The reason for each version that is not ready, by `name` or `name version N`."""
        found = {str(known.id): known.trouble for known in self if known.trouble}
        for known in self:
            for number, status in known.versions.items():
                if status.wanted and not status.ready:
                    found[f"{known.id} version {number}"] = status.trouble
        return found


def unknown(name: str) -> InferenceError:
    """The error for a model that is not in the table."""
    return _refusal(Code.NOT_FOUND, f"'{name}' is not found")


def _refusal(code: Code, text: str) -> InferenceError:
    return InferenceError(code, f"Request for unknown model: {text}")


def _highest(known: KnownModel) -> Model:
    loaded = None
    for status in reversed(known.versions.values()):
        if (model := status.model) is not None and model.ready:
            return model
        loaded = loaded or model
    if loaded is not None:
        return loaded
    if any(status.state is VersionState.LOADING for status in known.versions.values()):
        raise _refusal(Code.UNAVAILABLE, f"'{known.id.name}' is still loading")
    raise _refusal(Code.NOT_FOUND, f"'{known.id.name}' has no available versions")


def _numbered(known: KnownModel, version: str) -> Model:
    status = known.versions.get(_version_number(version))
    if status is None:
        raise _refusal(Code.NOT_FOUND, f"'{known.id.name}' version {version} is not found")
    if status.model is None:
        raise _refusal(
            Code.UNAVAILABLE, f"'{known.id.name}' version {version} is not at ready state"
        )
    return status.model


def _version_number(version: str) -> int:
    try:
        number = int(version)
    except ValueError:
        number = 2**63
    if number >= 2**63 or not version.removeprefix("-").isdigit():
        raise InferenceError(
            Code.INVALID_ARG,
            f"failed to get model version from specified version string '{version}' (details: "
            "stol), version should be an integral value > 0",
        )
    if number < 0:
        raise InferenceError(
            Code.INVALID_ARG,
            f"invalid model version specified '{version}' , version should be an integral value "
            "> 0",
        )
    return number


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One version of a model; only the name if the model was never loaded."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


def rows(table: ModelTable, on_disk: Iterable[ModelId], *, ready: bool) -> list[IndexRow]:
    """Rows for models on disk, loaded or failed, ordered by name and version.

    `ready` keeps only READY versions.
    """
    ids = sorted({*on_disk, *(known.id for known in table if _is_listed(known))})
    found = [row for each in ids for row in _rows_of(each, table.get(each))]
    return [row for row in found if not ready or row.state == VersionState.READY]


def _is_listed(known: KnownModel) -> bool:
    """Whether the index has a model that is not on disk: not all versions are unloaded."""
    gone = (s.state is VersionState.UNAVAILABLE and not s.wanted for s in known.versions.values())
    return bool(known.trouble) or not all(gone)


def _rows_of(model: ModelId, known: KnownModel | None) -> Iterator[IndexRow]:
    if known is not None and known.versions:
        for number, status in known.versions.items():
            yield _row(model.name, number, status)
    elif known is not None and known.trouble:
        yield IndexRow(model.name, "", VersionState.UNAVAILABLE, known.trouble)
    else:
        yield IndexRow(model.name)


def _row(name: str, number: int, status: VersionStatus) -> IndexRow:
    if status.model is not None and not status.ready:
        return IndexRow(name, str(number), VersionState.UNAVAILABLE, status.trouble)
    return IndexRow(name, str(number), status.state, status.reason)
