"""The life of loaded models: each has one task that runs it, drains it and closes it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.errors import InferenceError
from gateway.models.model import Model
from gateway.models.wakefulness import Wakefulness


@dataclass(slots=True)
class _Life:
    """When a model is to end, and who wants to hear that it has."""

    ended: list[Callable[[], None]]
    retired: asyncio.Event = field(default_factory=asyncio.Event)


class RunningModels:
    """Owns every loaded model from its first request to its end.

    A retired model serves what it has been given, and who holds it, and is then closed.
    """

    def __init__(self, on_change: Callable[[], None], wakefulness: Wakefulness) -> None:
        self._on_change = on_change
        self._wakefulness = wakefulness
        self._lives: dict[Model, _Life] = {}
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Own models inside the block, which ends cancelled; then every one of them is closed."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                yield
        finally:
            for model in tuple(self._lives):  # their tasks had not begun
                await model.close()

    def start(self, model: Model, ended: Callable[[], None]) -> None:
        """Run a prepared model; `ended` is called when it has been closed."""
        assert self._tasks is not None  # noqa: S101 - nothing is loaded outside the block
        model.wakefulness = self._wakefulness
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
                running = tasks.create_task(model.run(self._on_change))
                await life.retired.wait()
                await model.unneeded()
                running.cancel()
        finally:
            await model.close()
            del self._lives[model]
            for tell in life.ended:
                tell()
