"""What does the index of the repository list? (model repository extension)"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gateway.models.identity import ModelId
from gateway.models.table import Known, ModelTable, State, Status


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One version of a model; only the name if it was never loaded."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


def rows(table: ModelTable, on_disk: Iterable[ModelId], *, ready: bool) -> list[IndexRow]:
    """Every model on disk and every one that is loaded or failed to, by name and version.

    `ready` leaves only the versions that serve.
    """
    ids = sorted({*on_disk, *(known.id for known in table if _is_listed(known))})
    found = [row for each in ids for row in _rows_of(each, table.get(each))]
    return [row for row in found if not ready or row.state == State.READY]


def _is_listed(known: Known) -> bool:
    """Whether a model that is not on disk is still there: not all of it has been unloaded."""
    gone = (s.state is State.UNAVAILABLE and not s.wanted for s in known.versions.values())
    return bool(known.trouble) or not all(gone)


def _rows_of(model: ModelId, known: Known | None) -> Iterator[IndexRow]:
    if known is not None and known.versions:
        for number, status in known.versions.items():
            yield _row(model.name, number, status)
    elif known is not None and known.trouble:
        yield IndexRow(model.name, "", State.UNAVAILABLE, known.trouble)
    else:
        yield IndexRow(model.name)


def _row(name: str, number: int, status: Status) -> IndexRow:
    if status.model is not None and not status.ready:
        return IndexRow(name, str(number), State.UNAVAILABLE, status.trouble)
    return IndexRow(name, str(number), status.state, status.reason)
