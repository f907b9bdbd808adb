"""Changes in model folders since the last poll, and the loads that follow."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gateway.errors import InferenceError
from gateway.models.lifecycle import Lifecycle
from gateway.models.load_failures import outcome
from gateway.models.model_folder import Snapshot
from gateway.models.repository import ModelId, ModelRepository
from gateway.models.table import ModelTable
from gateway.threads import Threads

log = logging.getLogger("sluice.poller")


@dataclass(frozen=True, slots=True)
class Changes:
    """Models to load, new or modified, by the state of their folders; models to unload."""

    load: Mapping[ModelId, Snapshot] = field(default_factory=dict)
    unload: tuple[ModelId, ...] = ()


def compare(
    before: Mapping[ModelId, Snapshot | None],
    now: Mapping[ModelId, Snapshot | Exception],
    serving: Iterable[ModelId],
) -> Changes:
    """The changes; `before` is the state of each folder at the last attempt to load it.

    A failed attempt is repeated only after a change of the folder. A model with an unreadable
    folder keeps its state.
    """
    return Changes(
        load={
            model: found
            for model, found in sorted(now.items())
            if not isinstance(found, Exception) and before.get(model) != found
        },
        unload=tuple(sorted(model for model in serving if model not in now)),
    )


class Poller:
    """Loads and unloads models as their folders change."""

    def __init__(
        self,
        repository: ModelRepository,
        table: ModelTable,
        lifecycle: Lifecycle,
        threads: Threads,
    ) -> None:
        self._repository = repository
        self._table = table
        self._lifecycle = lifecycle
        self._threads = threads
        self._unreadable: set[ModelId] = set()

    async def poll(self) -> None:
        """Load new and changed models, unload removed models; returns when all are done."""
        try:
            now = await self._threads.run(self._repository.snapshots)
        except InferenceError as error:
            log.error("repository poll failed", extra={"reason": error.reason})
            return
        except Exception:
            # Around one poll: the loaded models keep serving, and the next poll may succeed.
            log.exception("repository poll failed")
            return
        self._log_unreadable(now)
        changes = compare({known.id: known.seen for known in self._table}, now, self._wanted())
        async with asyncio.TaskGroup() as tasks:
            for model, snapshot in changes.load.items():
                tasks.create_task(outcome(model, self._lifecycle.follow(model, snapshot)))
            for model in changes.unload:
                tasks.create_task(outcome(model, self._lifecycle.unload(model)))

    def _log_unreadable(self, now: Mapping[ModelId, Snapshot | Exception]) -> None:
        """Log each unreadable folder once, until it is readable again."""
        errors = {model: each for model, each in now.items() if isinstance(each, Exception)}
        for model in errors.keys() - self._unreadable:
            extra = {"model": str(model)}
            log.error("model folder poll failed", extra=extra, exc_info=errors[model])
        self._unreadable = set(errors)

    def _wanted(self) -> list[ModelId]:
        return [
            known.id
            for known in self._table
            if known.trouble
            or known.suspended is not None
            or any(status.wanted for status in known.versions.values())
        ]
