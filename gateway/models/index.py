"""The index of models: a row for each version, with its state and its reason."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from gateway.models.registry import KnownModel, ModelRegistry, VersionState, VersionStatus
from gateway.models.repository import ModelId

ASLEEP = "asleep"


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One version of a model; only the name if the model was never loaded."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


def index_rows(
    registry: ModelRegistry,
    on_disk: Iterable[ModelId],
    downloading: Callable[[str], str],
    *,
    ready: bool = False,
) -> list[IndexRow]:
    """Rows for models on disk, loaded or failed, ordered by name and version.

    `downloading` is the progress of the download of a model, "" if there is none. `ready` keeps
    only READY versions.
    """
    ids = sorted({*on_disk, *(known.id for known in registry if _is_listed(known))})
    found = [row for each in ids for row in _rows_of(each, registry.get(each))]
    found = [
        replace(row, reason=row.reason or downloading(row.name))
        if row.state == VersionState.LOADING
        else row
        for row in found
    ]
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
    asleep = status.model is not None and status.model.instances.asleep
    return IndexRow(name, str(number), status.state, ASLEEP if asleep else status.reason)
