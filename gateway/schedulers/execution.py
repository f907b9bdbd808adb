"""One execution: deliver its answers, and stop it when nobody waits."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from gateway.backend import Instance, Note
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, Phases
from gateway.observability.record import within
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.scheduler import Entry

log = logging.getLogger("sluice.execution")

NOT_ITERATIVE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
    "configured to handle such a flag."
)


class Terms(NamedTuple):
    """What is special about an execution.

    `unheard` are the rows that the instance adds to those of the entries, and nobody hears of.
    `to_the_end`: it goes on when nobody waits any more, because what it leaves behind matters.
    """

    unheard: int = 0
    to_the_end: bool = False


PLAIN = Terms()


def _not_freed() -> None:
    """Most instances are free only when an execution has ended."""


def _not_rescheduled(entry: Entry) -> None:
    """Only iterative sequences execute a request more than once."""
    entry.stream.fail(InferenceError(Code.INTERNAL, NOT_ITERATIVE))


async def execute(
    instance: Instance,
    entries: Sequence[Entry],
    statistics: ModelStatistics,
    *,
    freed: Callable[[], None] = _not_freed,
    rescheduled: Callable[[Entry], None] = _not_rescheduled,
    terms: Terms = PLAIN,
) -> None:
    """Run one execution; when it returns or is cancelled, all its streams are done.

    Entries that nobody waits for any more are left out. The task that runs it is cancelled once
    readers have left and none is waiting, unless its terms say otherwise. `freed` is called if the
    instance takes another execution before this one has ended, `rescheduled` with an entry that is
    to be executed again: whoever takes it must see to it that its stream ends.
    """
    present = dict(enumerate([entry for entry in entries if not entry.stream.done]))
    if not present:
        return
    batch_size = terms.unheard + sum([entry.record.batch_size for entry in present.values()])
    begin_ns = time.perf_counter_ns()
    phases: Phases | None = None
    delivery = _Delivery(present, freed, rescheduled)
    delivery.watch(to_the_end=terms.to_the_end)
    try:
        phases = await delivery.deliver(instance)
    except asyncio.CancelledError:
        delivery.fail(InferenceError(Code.UNAVAILABLE, "the server stopped this execution"))
        raise
    except InferenceError as error:
        delivery.fail(error)
    except Exception:
        # Around one execution: whatever a backend lets slip is logged here, and only here.
        model = next(iter(entries)).request.model
        log.exception("execution failed", extra={"model": model})
        delivery.fail(InferenceError(Code.INTERNAL, _unexpected(model)))
    finally:
        delivery.end()
        if not statistics.composed:
            statistics.executed(batch_size, within(phases, time.perf_counter_ns() - begin_ns))


class _Delivery:
    """From an instance's answers to the streams; the task that made this is cancelled once all
    readers have gone.

    `_open` are the entries by their index, less those that are to be executed again.
    """

    __slots__ = ("_freed", "_instance", "_open", "_rescheduled", "_some_left", "_task", "_told")

    def __init__(
        self,
        entries: dict[int, Entry],
        freed: Callable[[], None],
        rescheduled: Callable[[Entry], None],
    ) -> None:
        self._open = entries
        self._freed = freed
        self._rescheduled = rescheduled
        self._instance: Instance | None = None
        self._some_left = False
        self._told: set[int] = set()
        self._task = asyncio.current_task()

    def watch(self, *, to_the_end: bool) -> None:
        """Hear of everybody who leaves from now on, if that makes any difference."""
        left = self._left
        for entry in self._open.values():
            entry.record.started()
            if not to_the_end:
                entry.stream.on_cancel(left)

    async def deliver(self, instance: Instance) -> Phases | None:
        """The execution's phases, if the backend has measured them."""
        phases: Phases | None = None
        requests = [entry.request for entry in self._open.values()]
        self._instance = instance
        async with aclosing(instance.execute(requests)) as answers:
            async for index, answer in answers:
                if isinstance(answer, Note):
                    self._take_note(index, answer)
                    continue
                stream = self._open[index].stream
                if isinstance(answer, InferenceError):
                    stream.fail(answer)
                else:
                    stream.put(answer)
                    phases = answer.phases or phases
                if stream.full:
                    await stream.room()
                if self._some_left and self._all_done():
                    break
        return phases

    def fail(self, error: InferenceError) -> None:
        """End all that are not done with an error."""
        for entry in self._open.values():
            entry.stream.fail(error)

    def end(self) -> None:
        """End all that are not done."""
        for entry in self._open.values():
            entry.stream.end()

    def _take_note(self, index: int, note: Note) -> None:
        if note is Note.FREED:
            self._freed()
        elif not self._open[index].stream.done:
            self._rescheduled(self._open.pop(index))

    def _left(self) -> None:
        self._some_left = True
        if self._task is not None and self._all_done():
            self._task.cancel()
        elif self._instance is not None:
            self._instance.left(self._gone())

    def _gone(self) -> list[InferRequest]:
        """The requests of those who have left and of whom nobody has told the instance yet."""
        gone = [
            index
            for index, entry in self._open.items()
            if entry.stream.cancelled and index not in self._told
        ]
        self._told.update(gone)
        return [self._open[index].request for index in gone]

    def _all_done(self) -> bool:
        return all(entry.stream.done for entry in self._open.values())


def _unexpected(model: str) -> str:
    return f"model '{model}' failed unexpectedly; the server's log says why"
