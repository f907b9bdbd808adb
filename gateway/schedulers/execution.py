"""One execution: deliver its answers, and stop it when nobody waits."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing

from gateway.backend import Instance
from gateway.errors import Code, InferenceError
from gateway.messages import Phases
from gateway.observability.record import within
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.scheduler import Entry

log = logging.getLogger("sluice.execution")


async def execute(
    instance: Instance, entries: Sequence[Entry], statistics: ModelStatistics
) -> None:
    """Run one execution; when it returns or is cancelled, all its streams are done.

    Entries that nobody waits for any more are left out. The task that runs it is cancelled once
    readers have left and none is waiting.
    """
    entries = [entry for entry in entries if not entry.stream.done]
    if not entries:
        return
    begin_ns = time.perf_counter_ns()
    phases: Phases | None = None
    readers = _Readers(entries)
    readers.watch()
    try:
        phases = await _deliver_answers(instance, entries, readers)
    except asyncio.CancelledError:
        _fail(entries, InferenceError(Code.UNAVAILABLE, "the server stopped this execution"))
        raise
    except InferenceError as error:
        _fail(entries, error)
    except Exception:
        # Around one execution: whatever a backend lets slip is logged here, and only here.
        log.exception("execution failed", extra={"model": entries[0].request.model})
        _fail(entries, InferenceError(Code.INTERNAL, _unexpected(entries)))
    finally:
        _end(entries)
        batch_size = sum([entry.record.batch_size for entry in entries])
        statistics.executed(batch_size, within(phases, time.perf_counter_ns() - begin_ns))


class _Readers:
    """Those who wait for an execution; the task that made this is cancelled once all have gone."""

    __slots__ = ("_entries", "_task", "some_left")

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.some_left = False
        self._entries = entries
        self._task = asyncio.current_task()

    def watch(self) -> None:
        """Hear of everybody who leaves from now on."""
        left = self._left
        for entry in self._entries:
            entry.record.started()
            entry.stream.on_cancel(left)

    def _left(self) -> None:
        self.some_left = True
        if self._task is not None and _all_done(self._entries):
            self._task.cancel()


async def _deliver_answers(
    instance: Instance, entries: Sequence[Entry], readers: _Readers
) -> Phases | None:
    """The execution's phases, if the backend has measured them."""
    phases: Phases | None = None
    requests = [entry.request for entry in entries]
    async with aclosing(instance.execute(requests)) as answers:
        async for index, response in answers:
            stream = entries[index].stream
            if isinstance(response, InferenceError):
                stream.fail(response)
            else:
                stream.put(response)
                phases = response.phases or phases
            if stream.full:
                await stream.room()
            if readers.some_left and _all_done(entries):
                break
    return phases


def _all_done(entries: Sequence[Entry]) -> bool:
    return all(entry.stream.done for entry in entries)


def _fail(entries: Sequence[Entry], error: InferenceError) -> None:
    for entry in entries:
        entry.stream.fail(error)


def _end(entries: Sequence[Entry]) -> None:
    for entry in entries:
        entry.stream.end()


def _unexpected(entries: Sequence[Entry]) -> str:
    return f"model '{entries[0].request.model}' failed unexpectedly; the server's log says why"
