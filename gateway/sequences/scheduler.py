"""The sequence batcher: requests of one sequence execute on one instance, one after the other.

`table.py` assigns slots to sequences, `ready_requests.py` forms batches, and `inputs.py` makes
control inputs and states.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple, NoReturn

from gateway.backend import Instance
from gateway.batches.padding import Padding
from gateway.config import ModelConfig
from gateway.config.scheduling import ControlKind, DynamicBatching, SequenceBatching, StrategyDirect
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, SequenceTag, request_prefix
from gateway.observability.statistics import SEQUENCE_TIMEOUT, ModelStatistics
from gateway.schedulers.begun_executions import all_ended
from gateway.schedulers.execution import Entry, Execution
from gateway.schedulers.parts import OpenSequences
from gateway.schedulers.queue import QueueAdmission, QueuedRequest, QueueRules
from gateway.schedulers.rate_limiter import Registration
from gateway.schedulers.response_order import ResponseOrder
from gateway.schedulers.scheduler import Scheduler, Timer
from gateway.sequences.inputs import ExecutionInputs, InitialStates, controls_of
from gateway.sequences.instance_sequences import InstanceSequences, SequenceEvents
from gateway.sequences.ready_requests import ReadyCandidates, ReadyRequests, ReadySlots, Row
from gateway.sequences.table import OpenSequence, SequenceTable
from gateway.tensor import Datatype

log = logging.getLogger("sluice.sequences")

CANCELLED = "Request was cancelled"


class _Key(NamedTuple):
    """The batch key of a request with states: its own key, and the shapes of the states."""

    request: Hashable
    states: tuple[tuple[int, ...], ...]


class SequenceScheduler(Scheduler):
    """Keeps sequences on their instances by the rules of `sequence_batching`.

    `folder` is the model's. Raises InferenceError INVALID_ARG if the config's padding is invalid.
    """

    def __init__(
        self,
        config: ModelConfig,
        batching: SequenceBatching,
        statistics: ModelStatistics,
        folder: Path,
    ) -> None:
        self._config = config
        self._batching = batching
        self._statistics = statistics
        self.preparation = self._initial = InitialStates(config, folder)
        # The request of an open iterative sequence is always executing or queued.
        idle_us = 0 if batching.iterative_sequence else batching.max_sequence_idle_microseconds
        self._table = SequenceTable(idle_us, self._busy)
        self.sequences: OpenSequences = self._table
        self._admission = SequenceAdmission(config, lambda each: self.sequences.continues(each))
        self._arrivals = QueueAdmission(config, QueueRules(DynamicBatching()), Padding.read(config))
        self._hosts: dict[object, InstanceSequences] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._idle = Timer(self._close_idle)
        self._deadline = Timer(self._expire)
        self._own_ids = count(1)
        reschedule = self._reschedule if batching.iterative_sequence else None
        self._events = SequenceEvents(self._release, self._executed, reschedule)

    def admit(self, request: InferRequest) -> None:
        self._admission.check(request)
        self._arrivals.check(request)

    def submit(self, entry: Entry) -> None:
        tag = self._tag(entry.request)
        if tag is not entry.request.sequence:
            entry = replace(entry, request=replace(entry.request, sequence=tag))
        if tag.start and self._table.knows(tag.key):
            self._warn_of_conflict(tag)
        self._push(entry, tag)

    def add(self, instance: Instance, registration: Registration | None = None) -> None:
        ready, order = self._strategy()
        slots = self._table.add(instance, self._slot_count)
        host = InstanceSequences(instance, slots, ready, self._events, self._statistics, order)
        self._hosts[instance] = host
        host.tasks = self._tasks
        host.open(ExecutionInputs(self._config, self._initial.states), registration)
        self._fill()

    def remove(self, instance: Instance, error: InferenceError | None = None) -> Awaitable[object]:
        """Sequences that have begun on the instance end there.

        With an error they fail: the instance may have held their state.
        """
        host = self._hosts.get(instance)
        if host is None:
            return all_ended({})
        self._retire(host)
        if error is not None:
            del self._hosts[instance]
            host.fail(error)
            for sequence in host.sequences:
                self._drop(sequence, error, host)
        self._fill()
        emptied = host.emptied()
        emptied.add_done_callback(lambda _: self._hosts.pop(instance, None))
        return asyncio.shield(emptied)

    @property
    def executions(self) -> Iterable[Execution]:
        return [each for host in self._hosts.values() for each in host.executions]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                self._watch()
                for host in self._hosts.values():
                    host.tasks = tasks
                    host.consider()
                await asyncio.Event().wait()
            finally:
                self._tasks = None
                self._idle.clear()
                self._deadline.clear()
                for host in self._hosts.values():
                    host.rest()

    # The strategy of the config.

    @property
    def _slot_count(self) -> int:
        """The number of sequences that an instance has at once."""
        oldest = self._batching.oldest
        candidates = oldest.max_candidate_sequences if oldest else 0
        return candidates if candidates > 0 else max(1, self._config.max_batch_size)

    def _strategy(self) -> tuple[ReadyRequests, ResponseOrder | None]:
        oldest = self._batching.oldest
        if oldest is None:
            return ReadySlots(self._config, self._batching.direct or StrategyDirect()), None
        in_order = oldest.preserve_ordering and not self._batching.iterative_sequence
        order = ResponseOrder() if in_order else None
        return ReadyCandidates(self._config, oldest), order

    def _busy(self, instance: object) -> bool:
        return self._hosts[instance].busy

    # Arriving requests.

    def _tag(self, request: InferRequest) -> SequenceTag:
        """The request's tag; without an id, a request of an iterative model is a new sequence."""
        tag = request.sequence
        if tag is not None and tag.correlation_id:
            return tag
        own = next(each for each in self._own_ids if not self._table.knows(each))
        return SequenceTag(own, start=True, end=tag.end if tag else False)

    def _push(self, entry: Entry, tag: SequenceTag) -> None:
        now_ns = time.monotonic_ns()
        waiting = self._arrivals.waiting(entry, now_ns)
        sequence = self._table.push(waiting, tag, entry.request.timeout_us, now_ns)
        entry.stream.on_cancel(partial(self._cancelled, sequence, waiting))
        if sequence.slot is not None:
            self._watch()
            if sequence.waiting[0] is waiting:
                self._offer(sequence)
        elif sequence.deadline_ns:
            self._deadline.set(sequence.deadline_ns)

    def _warn_of_conflict(self, tag: SequenceTag) -> None:
        log.warning(
            "sequence %s for model '%s' has a conflict. The previous sequence did not end before "
            "this sequence start. Previous sequence will be terminated early.",
            *(tag.correlation_id, self._config.name),
        )

    def _reschedule(self, row: Row) -> None:
        """Queue a request again, as the last of its sequence, without flags."""
        entry, sequence = row.waiting.entry, row.sequence
        if sequence.closed:
            entry.stream.fail(self._admission.not_started(sequence.tag.correlation_id))
            return
        tag = replace(sequence.tag, start=False, end=False)
        request = replace(entry.request, sequence=tag, timeout_us=0)
        self._push(replace(entry, request=request, arrived_ns=0), tag)

    # Sequences that continue.

    def _offer(self, sequence: OpenSequence | None) -> None:
        """Make the next request of a sequence ready, and of those that get its slot afterwards."""
        while sequence is not None and sequence.waiting and not sequence.busy:
            self._set_key(sequence)
            host = self._hosts[sequence.owner]
            ended = host.offer(sequence)
            host.consider()
            sequence = self._table.release(sequence, time.monotonic_ns()) if ended else None

    def _set_key(self, sequence: OpenSequence) -> None:
        """Requests with states of different shapes share no batch."""
        waiting = sequence.waiting[0]
        tag = waiting.entry.request.sequence
        starts = not sequence.states or (tag is not None and tag.start)
        states = self._initial.states.initial if starts else sequence.states
        if shapes := self._initial.states.shapes(states):
            key = waiting.key
            waiting.key = _Key(key.request if isinstance(key, _Key) else key, shapes)

    def _executed(self, rows: Sequence[Row]) -> None:
        for row in rows:
            row.sequence.busy = False
            if self._batching.iterative_sequence and not row.sequence.waiting:
                self._table.close(row.sequence)
            self._continue(row.sequence)

    def _continue(self, sequence: OpenSequence) -> None:
        if sequence.waiting:
            self._offer(sequence)
        elif sequence.closed:
            self._release(sequence)

    def _release(self, sequence: OpenSequence) -> None:
        """Give the slot of a sequence, if it has one, to the backlog."""
        if sequence.slot is None:
            return
        host = self._hosts.get(sequence.owner)
        following = self._table.release(sequence, time.monotonic_ns())
        if following is not None:
            self._watch()
            self._offer(following)
        if host is not None:
            host.notice_empty()

    def _fill(self) -> None:
        while (sequence := self._table.fill(time.monotonic_ns())) is not None:
            self._watch()
            self._offer(sequence)

    # Cancelled, dropped and idle sequences.

    def _cancelled(self, sequence: OpenSequence, waiting: QueuedRequest) -> None:
        """Cancel a queued request and all later ones; in the backlog the whole sequence."""
        if not waiting.queued:
            return
        cancelled = InferenceError(Code.CANCELLED, CANCELLED)
        behind = sequence.waiting if sequence.busy else islice(sequence.waiting, 1, None)
        if sequence.slot is not None and waiting in behind:
            for each in self._table.cut(sequence, waiting):
                each.entry.stream.fail(cancelled)
        else:
            self._drop(sequence, cancelled, self._hosts.get(sequence.owner))

    def _drop(
        self, sequence: OpenSequence, error: InferenceError, host: InstanceSequences | None
    ) -> None:
        entries = host.drop(sequence) if host is not None else []
        entries += [each.entry for each in self._table.drop(sequence)]
        for entry in entries:
            entry.stream.fail(error)
        if not sequence.busy:
            self._release(sequence)
        if host is not None:
            host.notice_empty()

    def _retire(self, host: InstanceSequences) -> None:
        """Retire an instance's slots; sequences that have not begun may begin elsewhere."""
        self._table.retire(host.slots)
        unbegun = host.drop_unbegun()
        self._table.send_back(sorted(unbegun, key=_first_arrived_ns))

    def _watch(self) -> None:
        if self._tasks is not None and (idle_ns := self._table.idle_ns):
            self._idle.set(idle_ns)

    def _close_idle(self) -> None:
        for sequence in self._table.close_idle(time.monotonic_ns()):
            if not sequence.busy and not sequence.waiting:
                self._release(sequence)
        self._watch()

    def _expire(self) -> None:
        for waiting in self._table.expire(time.monotonic_ns()):
            waiting.entry.stream.fail(InferenceError(Code.UNAVAILABLE, SEQUENCE_TIMEOUT))
        if deadline_ns := self._table.deadline_ns:
            self._deadline.set(deadline_ns)


def _first_arrived_ns(sequence: OpenSequence) -> int:
    return sequence.waiting[0].arrived_ns


class SequenceAdmission:
    """The checks of one model's requests, with Triton's order and texts.

    `continues` says whether a request continues an open sequence.
    """

    def __init__(self, config: ModelConfig, continues: Callable[[InferRequest], bool]) -> None:
        batching = config.sequence_batching
        self._model = config.name
        self._batching = config.batching
        self._iterative = batching is not None and batching.iterative_sequence
        self._continues = continues
        self._ids = [
            (name, control.data_type.datatype)
            for name, control in controls_of(config)
            if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID
        ]

    def check(self, request: InferRequest) -> None:
        """Raise INVALID_ARG if the request cannot belong to a sequence."""
        tag = request.sequence
        if tag is not None:
            self._check_type(tag, request)
        if self._batching and request.inputs and request.inputs[0].shape[0] > 1:
            _refuse(
                f"inference request to model '{self._model}' must specify batch-size 1 due to "
                "requirements of sequence batcher"
            )
        if tag is None or not tag.correlation_id:
            if not self._iterative:
                _refuse(
                    f"inference request to model '{self._model}' must specify a non-zero or "
                    "non-empty correlation ID"
                )
        elif not tag.start and not self._continues(request):
            raise self.not_started(tag.correlation_id)

    def not_started(self, correlation_id: int | str) -> InferenceError:
        """The error of a request whose sequence is not open."""
        return InferenceError(
            Code.INVALID_ARG,
            f"inference request for sequence {correlation_id} to model '{self._model}' must "
            "specify the START flag on the first request of the sequence",
        )

    def _check_type(self, tag: SequenceTag, request: InferRequest) -> None:
        found = Datatype.BYTES if isinstance(tag.correlation_id, str) else Datatype.UINT64
        for name, expected in self._ids:
            if (found is Datatype.BYTES) is not (expected is Datatype.BYTES):
                _refuse(
                    f"{request_prefix(request.id)}sequence batching control '{name}' data-type is "
                    f"'{found}', but model '{self._model}' expects '{expected}'"
                )


def _refuse(message: str) -> NoReturn:
    raise InferenceError(Code.INVALID_ARG, message)
