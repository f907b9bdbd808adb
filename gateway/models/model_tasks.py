"""The tasks of loaded models: each runs, drains and closes one model."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.errors import InferenceError
from gateway.event_loop import BusyPoll
from gateway.models.closings import Closings
from gateway.models.model import Model
from gateway.models.progress import ProgressWatch


@dataclass(slots=True)
class _Life:
    """The end of a model: its event, and the callbacks after it."""

    ended: list[Callable[[], None]]
    retired: asyncio.Event = field(default_factory=asyncio.Event)
    closing: bool = False


class ModelTasks:
    """Owns every loaded model from its first request until it is closed.

    A retired model closes after its last request and its last `release`. `closings` own the closing
    of a model, so that it survives the end of the server. An instance without progress for
    `stall_secs` is restarted (seconds, 0: never).
    """

    def __init__(
        self,
        on_change: Callable[[], None],
        busy_poll: BusyPoll | None,
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
        """Own models inside the block, which ends cancelled; then close all of them."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                watch = ProgressWatch(self._stall_secs)
                self._tasks.create_task(watch.run(lambda: self._lives, time.perf_counter_ns))
                yield
        finally:
            for model in tuple(self._lives):  # some tasks have not started
                self._begin_end(model)
            await self._closings.ended()

    def start(self, model: Model, ended: Callable[[], None]) -> None:
        """Run a prepared model; `ended` is called when it has been closed."""
        assert self._tasks is not None  # noqa: S101 - nothing is loaded outside the block
        model.busy_poll = self._busy_poll
        self._lives[model] = _Life([ended])
        self._tasks.create_task(self._live(model, self._lives[model]))

    def retire(self, model: Model, ended: Callable[[], None]) -> None:
        """End a model after its last request; no request may be submitted any more."""
        model.retired = True
        life = self._lives[model]
        life.ended.append(ended)
        life.retired.set()

    @property
    def in_flight(self) -> int:
        """Requests in flight in all models, retired models included."""
        return sum(model.in_flight for model in self._lives)

    async def sequences_ended(self) -> None:
        """Wait until no sequence of a model in service accepts more requests."""
        for model in tuple(self._lives):
            if not model.retired and model.sequences is not None:
                await model.sequences.ended()

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        for model in tuple(self._lives):
            await model.drained()

    def abandon(self, error: InferenceError) -> None:
        """End every request in flight with this error."""
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
            for callback in life.ended:
                callback()
