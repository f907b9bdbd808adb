"""The state of rollouts on disk: its reads and writes, apart from their judgement."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from gateway.errors import InferenceError
from gateway.models.repository import ModelId
from gateway.rollouts.model_rollouts import ModelRollouts
from gateway.rollouts.state import (
    DamagedRecord,
    OvertakenRecord,
    RolloutRecord,
    StateDirectory,
    unusable,
)
from gateway.threads import Threads

SAVE_SECS = 10.0
"""Time between two writes of a rollout without transitions, and until a failed one is retried."""
ANSWER_SECS = 10.0
"""Longest time for which a load waits for the disk."""
LAST_SECS = 2.0
"""Longest time for which the exit waits for the disk."""

log = logging.getLogger("sluice.rollouts")

T = TypeVar("T")


class FoundRecord(NamedTuple):
    """The record of a model, whether one of a rollout was damaged, or why it cannot be read."""

    record: RolloutRecord | None
    damaged: bool = False
    unreadable: str = ""


class DiskThread:
    """Calls in a thread of their own, at most one of each name: a disk may not answer."""

    def __init__(self, name: str) -> None:
        self._threads = Threads(name, 1)
        self._calls: dict[str, asyncio.Future[Any]] = {}

    def waits(self, name: str) -> bool:
        """Whether a call of this name has not ended."""
        return name in self._calls

    def start(self, name: str, function: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Start a call; a later one of its name is that call until it has ended."""
        call = self._calls[name] = self._threads.start(function, *args)
        call.add_done_callback(partial(self._ended, name))
        return call

    async def answer(self, name: str, function: Callable[..., T], *args: object) -> T:
        """The result of a call; UNAVAILABLE if the disk has not answered in time."""
        call: asyncio.Future[T] = self._calls.get(name) or self.start(name, function, *args)
        await asyncio.wait([call], timeout=ANSWER_SECS)
        if not call.done():
            raise _late(ANSWER_SECS)
        return call.result()

    def close(self) -> None:
        """Start no more calls."""
        self._threads.close()

    def _ended(self, name: str, call: asyncio.Future[Any]) -> None:
        if self._calls.get(name) is call:
            del self._calls[name]
        if not call.cancelled():
            call.exception()  # it may have no reader any more


class RolloutSaver:
    """Reads and writes the records of `models`; one task runs `run`, and nothing waits for it.

    A record that cannot be written stays dirty until it is. A disk that hangs holds only the
    threads of its own.
    """

    def __init__(self, models: Mapping[ModelId, ModelRollouts], state: StateDirectory) -> None:
        self._models = models
        self._state = state
        self._reads = DiskThread("state-reads")
        self._writes = DiskThread("state-writes")
        self._wake = asyncio.Event()
        self._is_failing = False

    def wake(self) -> None:
        """Write dirty records soon."""
        self._wake.set()

    async def read(self, name: str) -> FoundRecord:
        """The record of a model; a damaged one was moved aside."""
        try:
            return FoundRecord(await self._reads.answer(name, self._state.read, name))
        except DamagedRecord as error:
            log.error("rollout state damaged", extra={"model": name, "reason": str(error)})
            return FoundRecord(None, damaged=error.had_rollout)
        except InferenceError as error:
            log.error("rollout state not read", extra={"model": name, "reason": error.message})
            return FoundRecord(None, unreadable=error.message)

    async def require(self) -> None:
        """Take the folder for this server; raises as `StateDirectory.require`."""
        if not self._state.is_taken:
            await self._writes.answer("", self._state.require)

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
                try:
                    if self._writes.waits(str(model)):
                        raise _late(ANSWER_SECS)
                    record = of_model.encoded(), of_model.encodings
                    await self._writes.answer(str(model), self._state.write, str(model), *record)
                except OvertakenRecord as error:
                    of_model.unreadable = error.message
                    self._note_failure(error)
                except InferenceError as error:
                    of_model.dirty = failed = True
                    self._note_failure(error)
                except asyncio.CancelledError:
                    of_model.dirty = True  # the thread may not have begun
                    raise
        self._is_failing = failed

    async def close(self) -> None:
        """Write all that is dirty or open; then another server may have the folder.

        A disk that hangs is waited for at most `LAST_SECS`.
        """
        last = [
            (str(model), of_model.encoded(), of_model.encodings)
            for model, of_model in self._models.items()
            if (of_model.dirty or of_model.open is not None) and not of_model.unreadable
        ]
        try:
            if last:
                writing = self._writes.start("", self._write_all, last)
                await asyncio.wait([writing], timeout=LAST_SECS)
                error = writing.result() if writing.done() else _late(LAST_SECS)
                if error is not None:
                    self._note_failure(error)
        finally:
            self._reads.close()
            self._writes.close()
            self._state.close()

    def _write_all(self, records: Iterable[tuple[str, bytes, int]]) -> InferenceError | None:
        """Write records; returns the last error. It blocks."""
        found = None
        for record in records:
            try:
                self._state.write(*record)
            except InferenceError as error:
                found = error
        return found

    def _note_failure(self, error: InferenceError) -> None:
        if not self._is_failing:
            self._is_failing = True
            log.error("rollout state not written", extra={"reason": error.message})


def _late(secs: float) -> InferenceError:
    return unusable(f"the state directory has not answered for {secs:g} s")
