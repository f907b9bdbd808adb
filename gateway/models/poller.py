"""What has changed on disk since the models were loaded?"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.models.identity import ModelId
from gateway.models.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Changes:
    """Models to load, since they are new or were modified, and models that are gone."""

    load: tuple[ModelId, ...] = ()
    unload: tuple[ModelId, ...] = ()


def compare(
    before: Mapping[ModelId, Snapshot | None],
    now: Mapping[ModelId, Snapshot],
    serving: Iterable[ModelId],
) -> Changes:
    """What to do; `before` is how each folder was at the last attempt to load it.

    An attempt that failed is made again only when the folder has changed.
    """
    modified = (model for model in now if before.get(model) != now[model])
    return Changes(
        load=tuple(sorted(modified)),
        unload=tuple(sorted(model for model in serving if model not in now)),
    )
