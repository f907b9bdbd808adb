"""The writes of the state of rollouts, apart from their judgement."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

from gateway.errors import InferenceError
from gateway.models.repository import ModelId
from gateway.rollouts.model_rollouts import ModelRollouts
from gateway.rollouts.state import StateDirectory
from gateway.threads import Threads

SAVE_SECS = 10.0
"""Time between two writes of a rollout without transitions, and until a failed one is retried."""

log = logging.getLogger("sluice.rollouts")


class RolloutSaver:
    """Writes the records of `models`; one task runs `run`, and nothing waits for it.

    A record that cannot be written stays dirty until it is.
    """

    def __init__(
        self, models: Mapping[ModelId, ModelRollouts], state: StateDirectory, threads: Threads
    ) -> None:
        self._models = models
        self._state = state
        self._threads = threads
        self._wake = asyncio.Event()
        self._is_failing = False

    def wake(self) -> None:
        """Write dirty records soon."""
        self._wake.set()

    async def run(self) -> None:
        """Write dirty records at once, and those of open rollouts each `SAVE_SECS`."""
        now = asyncio.get_running_loop().time
        saved_at = now()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(saved_at + SAVE_SECS if self._is_any_due else None):
                    await self._wake.wait()
            self._wake.clear()
            is_time = now() >= saved_at + SAVE_SECS
            if is_time:
                saved_at = now()
            await self._save(is_time=is_time)

    @property
    def _is_any_due(self) -> bool:
        return any(each.dirty or each.open is not None for each in self._models.values())

    async def _save(self, *, is_time: bool) -> None:
        failed = False
        for model, of_model in tuple(self._models.items()):
            is_due = of_model.dirty or (is_time and of_model.open is not None)
            if is_due and not of_model.unreadable:
                record, order = of_model.encoded(), of_model.encodings
                try:
                    await self._threads.run(self._state.write, str(model), record, order)
                except InferenceError as error:
                    failed = True
                    self._note_failure(of_model, error)
                except asyncio.CancelledError:
                    of_model.dirty = True  # the thread may not have begun
                    raise
        self._is_failing = failed

    def save_last(self) -> None:
        """Write all that is dirty or open; blocks."""
        for model, of_model in self._models.items():
            if (of_model.dirty or of_model.open is not None) and not of_model.unreadable:
                try:
                    self._state.write(str(model), of_model.encoded(), of_model.encodings)
                except InferenceError as error:
                    self._note_failure(of_model, error)

    def _note_failure(self, of_model: ModelRollouts, error: InferenceError) -> None:
        of_model.dirty = True
        if not self._is_failing:
            self._is_failing = True
            log.error("rollout state not written", extra={"reason": error.message})
