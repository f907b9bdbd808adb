"""The life of loaded models: each has one task that runs it, drains it and closes it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.errors import InferenceError
from gateway.models.busy_poll import BusyPoll
from gateway.models.closings import Closings
from gateway.models.model import Model
from gateway.models.progress import ProgressWatch


@dataclass(slots=True)
class _Life:
    """When a model is to end, and who wants to hear that it has."""

    ended: list[Callable[[], None]]
    retired: asyncio.Event = field(default_factory=asyncio.Event)
    closing: bool = False


class ModelTasks:
    """Owns every loaded model from its first request to its end.

    A retired model closes after its last request and its last `release`. The server may stop
    meanwhile: `closings` own the end of a model. An instance without progress for
    `stall_secs` is restarted; 0 is never.
    """

    def __init__(
        self,
        on_change: Callable[[], None],
        busy_poll: BusyPoll,
        closings: Closings,
        stall_secs: float = 0.0,
    ) -> None:
        self._on_change = on_change
        self._closings = closings
        self._stall_secs = stall_secs
        self._busy_poll = busy_poll
        self._lives: dict[Model, _Life] = {}
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Own models inside the block, which ends cancelled; then every one of them is closed."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                watch = ProgressWatch(self._stall_secs)
                self._tasks.create_task(watch.run(lambda: self._lives, time.perf_counter_ns))
                yield
        finally:
            for model in tuple(self._lives):  # the tasks of some had not begun
                self._begin_end(model)
            await self._closings.ended()

    def start(self, model: Model, ended: Callable[[], None]) -> None:
        """Run a prepared model; `ended` is called when it has been closed."""
        assert self._tasks is not None  # noqa: S101 - nothing is loaded outside the block
        model.busy_poll = self._busy_poll
        self._lives[model] = _Life([ended])
        self._tasks.create_task(self._live(model, self._lives[model]))

    def retire(self, model: Model, ended: Callable[[], None]) -> None:
        """Let a model end with its last request; nobody may submit another."""
        model.retired = True
        life = self._lives[model]
        life.ended.append(ended)
        life.retired.set()

    @property
    def in_flight(self) -> int:
        """Requests in flight in all models, those that are ending included."""
        return sum(model.in_flight for model in self._lives)

    async def sequences_ended(self) -> None:
        """Wait until no sequence takes any more requests in any model that is not retired."""
        for model in tuple(self._lives):
            if not model.retired:
                await model.sequences_ended()

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        for model in tuple(self._lives):
            await model.drained()

    def abandon(self, error: InferenceError) -> None:
        """End every request in flight with an error."""
        for model in tuple(self._lives):
            model.abandon(error)

    async def _live(self, model: Model, life: _Life) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                executing = self._closings.run(
                    model.run(self._on_change),
                    lambda: [each.instance for each in model.executions],
                    model.name,
                )
                running = tasks.create_task(executing)
                await life.retired.wait()
                await model.unneeded()
                running.cancel()
        finally:
            self._begin_end(model)

    def _begin_end(self, model: Model) -> None:
        life = self._lives.get(model)
        if life is not None and not life.closing:
            life.closing = True
            self._closings.adopt(self._end(model, life))

    async def _end(self, model: Model, life: _Life) -> None:
        try:
            await model.close()
        finally:
            del self._lives[model]
            for tell in life.ended:
                tell()
