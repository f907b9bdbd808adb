"""Executions: one call of an instance, its answers, and its cancellation."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gateway.backend import Begun, Instance, Note, NotSent, SingleExecutions
from gateway.errors import Code, InferenceError, no_instance
from gateway.messages import InferRequest, InferResponse, Phases
from gateway.observability.receipt_parts import NO_HOLD, NOT_KNOWN, Hold, note_batch
from gateway.observability.request_record import Record
from gateway.observability.statistics import ModelStatistics, within
from gateway.schedulers.sequence_call import NO_SEQUENCES, SequenceCall
from gateway.schedulers.service import Service, charge_each
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.execution")

LAG_BYTES = 16 << 20
"""Limit of a batch's unread bytes beyond the limits of its streams, while one stream has room."""

NOT_ITERATIVE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
    "configured to handle such a flag."
)


@dataclass(slots=True, eq=False)
class Entry:
    """A request on its way to an instance; it carries its own stream and account.

    Behind a fair queue it has a service, and `arrived_ns` is its arrival there
    (`time.monotonic_ns`).
    """

    request: InferRequest
    stream: ResponseStream
    record: Record
    arrived_ns: int = 0
    service: Service | None = None


def _not_freed() -> None:
    """By default an instance is free when its execution ends."""


def _not_rescheduled(entry: Entry) -> None:
    """Only iterative sequences execute a request again."""
    entry.stream.fail(InferenceError(Code.INTERNAL, NOT_ITERATIVE))


class Execution:
    """One call of an instance with one or more entries; runs once: in one task, or begun.

    Entries whose streams are done are omitted. It counts in `statistics` if one of them does. It
    stops once every stream is done and a reader has disconnected, unless its call runs to the end.
    Stopping cancels only its own wait: its task continues. `freed` is called if the instance takes
    another execution before this one ends; `rescheduled` with an entry to execute again.
    """

    __slots__ = (
        "_batch_size",
        "_began_ns",
        "_begun",
        "_call",
        "_counts",
        "_disconnects",
        "_ended",
        "_freed",
        "_interrupted",
        "_lags",
        "_open",
        "_rescheduled",
        "_statistics",
        "_stopped",
        "_task",
        "entries",
        "hold",
        "instance",
        "shared",
        "unsent",
    )

    def __init__(
        self,
        instance: Instance,
        entries: Sequence[Entry],
        statistics: ModelStatistics,
        *,
        freed: Callable[[], None] = _not_freed,
        rescheduled: Callable[[Entry], None] = _not_rescheduled,
        call: SequenceCall = NO_SEQUENCES,
    ) -> None:
        self.instance = instance
        self.entries = entries
        self.unsent = False
        """Set if the instance did not receive the entries that are not done: another one may."""
        self.hold: Hold = NO_HOLD
        """The limit for which its entries have waited; it is not known of sequences."""
        self.shared: dict[str, int] | None = None
        """All requests that the instance executes, by tenant, if it takes every one."""
        self._statistics = statistics
        self._freed = freed
        self._rescheduled = rescheduled
        self._call = call
        self._counts = False
        self._open: dict[int, Entry] = {}
        self._lags: dict[ResponseStream, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._began_ns = 0
        self._batch_size = 0
        self._begun: Begun | None = None
        self._ended: Callable[[], None] | None = None
        self._disconnects = False
        self._stopped = False
        self._interrupted = False

    @property
    def progress_ns(self) -> int:
        """The time of its latest response, or else of its start; 0 before it has begun."""
        return max(self._began_ns, *[each.record.progress_ns for each in self._open.values()], 0)

    @property
    def held_back(self) -> bool:
        """Whether a full stream may block it."""
        return any(entry.stream.full and not entry.stream.done for entry in self._open.values())

    async def run(self) -> None:
        """Execute; all of its streams are done when it returns or is cancelled."""
        await self.attempt()
        if self.unsent:
            model = self.entries[0].request.model
            _fail(self.entries, no_instance(f"model '{model}' failed: its instance has died"))

    async def attempt(self) -> None:
        """Execute; all of its streams are done afterwards, unless it is `unsent`."""
        if self.unsent or not self.instance.alive:
            self.unsent = True
            return
        began_ns = time.perf_counter_ns()
        requests, batch_size = self._begin()
        if not requests:
            return
        self._task = task = asyncio.current_task()
        self._began_ns, self._batch_size = began_ns, batch_size
        phases: Phases | None = None
        try:
            phases = await self._deliver(requests)
        except asyncio.CancelledError:
            self._fail_stopped()
            if task is None or task.cancelling() > self._interrupted:
                raise
        except Exception as error:  # noqa: BLE001 - around one execution
            self._fail_by(error)
        finally:
            self._end(phases)

    def begin(self, singles: SingleExecutions, ended: Callable[[], None]) -> None:
        """Execute the only entry without a task.

        `ended` is called once the instance can take another execution, maybe before this returns.
        """
        began_ns = time.perf_counter_ns()
        requests, self._batch_size = self._begin()
        if not requests:
            ended()
            return
        self._began_ns, self._ended = began_ns, ended
        try:
            begun = singles.begin(requests[0], self)
        except Exception as error:  # noqa: BLE001 - around one execution
            self.over(error)
            return
        if self._ended is not None:
            self._begun = begun
            if self._disconnects and self._all_done():
                self.stop()

    # As the reader of a begun execution.

    def take(self, answer: InferResponse | InferenceError | Note) -> None:
        """See `Reader.take`."""
        if isinstance(answer, Note):
            self._take_note(0, answer)
        elif isinstance(answer, InferenceError):
            self._open[0].stream.fail(self._numbered(answer))
        else:
            self._open[0].stream.put(answer)

    def over(self, error: Exception | None) -> None:
        """See `Reader.over`."""
        ended, self._ended = self._ended, None
        self._begun = None
        try:
            if error is not None:
                self._fail_by(error)
            entry = self._open.get(0)
            self._end(None if entry is None else entry.record.phases)
        finally:
            if ended is not None:
                ended()

    def cancel(self) -> None:
        """Cancel a begun execution; `ended` is still called. Others are cancelled by their task."""
        self._fail_stopped()
        self.stop()

    def refuse(self) -> bool:
        """Make it `unsent`, if it has not begun; False if it has begun."""
        self.unsent = self.unsent or not self._began_ns
        return self.unsent

    def stop(self) -> None:
        """Cancel its wait; no effect before its start and after its end."""
        if self._stopped or (self._task is None and self._begun is None):
            return
        self._stopped = True
        if self._begun is not None:
            self._begun.abandon()
            return
        if asyncio.current_task() is self._task:
            # The current step continues and may end it: only its next wait is cancelled.
            asyncio.get_running_loop().call_soon(self._interrupt)
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        if self._task is not None:
            self._interrupted = True
            self._task.cancel()

    def _begin(self) -> tuple[Sequence[InferRequest], int]:
        """Start the entries that are not done; their requests, and the size of their batch.

        They are watched for disconnects, unless the call runs to the end.
        """
        on_disconnect, runs_to_end = self._on_disconnect, self._call.runs_to_end
        # The call of a sequence may change the responses.
        has_sink = len(self.entries) == 1 and self._call.execute is None
        requests: list[InferRequest] = []
        batch_size = 0
        for entry in self.entries:
            stream, request = entry.stream, entry.request
            if stream.done:
                continue
            self._open[len(requests)] = entry
            batch_size += entry.record.batch_size
            self._counts = self._counts or entry.record.statistics is self._statistics
            entry.record.started()
            if not runs_to_end:
                stream.on_cancel(on_disconnect)
            # Requests are frozen for the type checker only; a copy would cost a microsecond.
            request.cancellation = None if runs_to_end else stream  # type: ignore[misc]
            request.sink = stream if has_sink else None  # type: ignore[misc]
            requests.append(request)
        if len(requests) > 1:
            for entry in self._open.values():
                entry.record.execution_rows = batch_size
        hold = self.hold if self._call is NO_SEQUENCES else NOT_KNOWN
        if len(requests) > 1 or hold is not NO_HOLD or self.shared is not None:
            note_batch(requests, batch_size, hold, self.shared)
        return requests, batch_size

    async def _deliver(self, requests: Sequence[InferRequest]) -> Phases | None:
        """Deliver all answers; return the phases, if the backend measured them.

        Those of responses that went to the sink are in the record.
        """
        phases: Phases | None = None
        answers = (self._call.execute or self.instance.execute)(requests)
        try:
            async for index, answer in answers:
                if isinstance(answer, Note):
                    self._take_note(index, answer)
                    continue
                stream = self._open[index].stream
                if isinstance(answer, InferenceError):
                    stream.fail(self._numbered(answer))
                else:
                    if self._lags and not stream.full:
                        self._lags.pop(stream, None)
                    phases = answer.phases or phases
                    if stream.put(answer):
                        await self._room(stream, answer)
                if self._disconnects and self._all_done():
                    break
        finally:
            await answers.aclose()
        if phases is None:
            for entry in self._open.values():
                phases = entry.record.phases
        return phases

    async def _room(self, stream: ResponseStream, answer: InferResponse) -> None:
        """Wait while a stream is full, unless another has room and the lag is small."""
        lag = self._lags.get(stream)
        self._lags[stream] = 0 if lag is None else lag + answer.weight_bytes
        while stream.full and not (stream.done or self._has_room()):
            wake = asyncio.get_running_loop().create_future()
            for entry in self._open.values():
                entry.stream.when_room(wake)
            await wake

    def _has_room(self) -> bool:
        streams = [entry.stream for entry in self._open.values() if not entry.stream.done]
        full = [stream for stream in streams if stream.full]
        lag = sum([self._lags.get(stream, 0) for stream in full])
        return len(full) < len(streams) and lag < LAG_BYTES

    def _take_note(self, index: int, note: Note) -> None:
        if note is Note.FREED:
            self._freed()
            for entry in self._open.values():
                if (reader := entry.record.reader) is not None:
                    reader.freed(entry.record)
        elif not _end_if_stopping(self._open[index].stream):
            self._rescheduled(self._open.pop(index))

    def _queue_again(self) -> int:
        """Queue the entries that were not received; return the batch size of the answered ones."""
        self.unsent = True
        answered = 0
        for entry in self._open.values():
            if entry.stream.done and not entry.stream.cancelled:
                answered += entry.record.batch_size
            elif not _end_if_stopping(entry.stream):
                entry.record.queued_again()
                if entry.request.receipt is not None:
                    entry.request.receipt.executes(None)
        return answered

    def _fail(self, error: InferenceError) -> None:
        _fail(self._open.values(), error)

    def _fail_stopped(self) -> None:
        if not self._all_done():
            self._fail(InferenceError(Code.UNAVAILABLE, "the server stopped this execution"))

    def _fail_by(self, error: Exception) -> None:
        """Fail the entries by the error of an instance, or queue them again."""
        if isinstance(error, NotSent):
            self._batch_size = self._queue_again()
        elif isinstance(error, InferenceError):
            self._fail(self._numbered(error))
        else:
            # An exception that a backend does not handle is logged here only.
            model = self.entries[0].request.model
            log.error("execution failed", extra={"model": model}, exc_info=error)
            text = f"model '{model}' failed unexpectedly; the server's log says why"
            self._fail(InferenceError(Code.INTERNAL, text))

    def _numbered(self, error: InferenceError) -> InferenceError:
        """The error of an instance, with its number if it has died."""
        if error.dead_instance == 0:
            error.dead_instance = self.instance.number
        return error

    def _end(self, phases: Phases | None) -> None:
        task, self._task = self._task, None
        if self._interrupted and task is not None:
            task.uncancel()
        for entry in self._open.values():
            entry.request.cancellation = entry.request.sink = None  # type: ignore[misc]  # as in _begin
            if not (self.unsent or entry.stream.done):
                entry.stream.end()
        counts = self._counts and not self._statistics.composed
        if counts and (self._batch_size or not self.unsent):
            spent = within(phases, time.perf_counter_ns() - self._began_ns)
            rows = self._batch_size + self._call.padding_rows
            self._statistics.executed(rows, spent)
            for entry in self._open.values():
                if (reader := (record := entry.record).reader) is None:
                    continue
                if (noted := reader.noted) and noted[-1] is record and record.ended_ns:
                    record.execution = spent, rows
                else:
                    charge_each([each.record for each in self._open.values()], spent, rows)
                    break

    def _on_disconnect(self) -> None:
        self._disconnects = True
        if self._all_done():
            self.stop()

    def _all_done(self) -> bool:
        return all(entry.stream.done for entry in self._open.values())


def _end_if_stopping(stream: ResponseStream) -> bool:
    """End a stopping stream that is not executing; whether it is done."""
    if stream.stopping:
        stream.fail(InferenceError(Code.CANCELLED, "Request was cancelled"))
    return stream.done


def _fail(entries: Iterable[Entry], error: InferenceError) -> None:
    for entry in entries:
        entry.stream.fail(error)
