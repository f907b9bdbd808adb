"""Executions of one worker: sent, prefetched, answered, released and ended."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from backends.python.codec import (
    FLAG,
    MUCH_BYTES,
    RequestEncoder,
    TensorReader,
    TensorWriter,
    read_response,
    to_json,
    write_in_thread,
)
from backends.python.connection import WorkerConnection
from backends.python.execution import Backlog, Prefetch, WorkerExecution
from backends.python.loading import WorkerLimits
from backends.python.worker.sluice_worker.protocol import ToWorker
from gateway.backend import NotSent
from gateway.errors import Code, InferenceError
from gateway.messages import Cancellation, InferRequest, InferResponse, Phases
from gateway.policy.caller import Caller, tenant_of

log = logging.getLogger("sluice.python")

ANSWER_BYTES = 64 << 10
"""The weight of an answer besides its tensors."""


class Owner(Protocol):
    """The worker that has the executions."""

    def kill(self, why: str) -> None:
        """End the process at once: a limit of time has passed."""

    def disconnected(self) -> None:
        """Clients have disconnected: calls that the model made for them can be cancelled."""


class WorkerExecutions:
    """Executions in progress; each request has a number of its own.

    `limits` are the model's limits of time.
    """

    def __init__(
        self,
        encoder: RequestEncoder,
        name: str,
        link: WorkerConnection,
        about: Mapping[str, object],
        owner: Owner,
    ) -> None:
        self.limits = WorkerLimits()
        self._encoder = encoder
        self._prefetch = Prefetch(allowed=encoder.alone)
        self._failed = f"Failed to process the request(s) for model '{name}', message: "
        self._link = link
        self._about = about
        self._owner = owner
        self._backlog = Backlog(link, ordered=not encoder.decoupled)
        self._by_number: dict[int, WorkerExecution] = {}
        self._by_request: dict[int, WorkerExecution] = {}
        self._disconnected: set[int] = set()
        self._touched: dict[WorkerExecution, None] = {}
        self._next = 1
        self._next_request = 1
        self._last: WorkerExecution | None = None
        self._overdue = False
        self._ended: InferenceError | None = None

    @property
    def model(self) -> str:
        """The model's name."""
        return self._encoder.model

    @property
    def decoupled(self) -> bool:
        """Whether a request may have any number of answers."""
        return self._encoder.decoupled

    @property
    def busy(self) -> bool:
        """Whether `execute` has not returned."""
        return bool(self._by_number)

    @property
    def unread_bytes(self) -> int:
        """The size of all unread answers."""
        return self._backlog.unread_bytes

    @property
    def suspects(self) -> list[InferRequest]:
        """The requests that may have ended the worker.

        Those of the execution in progress, or else all open ones. None if the worker was killed
        because of an abandoned execution: its requests are slow, not harmful.
        """
        if self._overdue:
            return []
        found = tuple(self._by_number.values())[:1] or self._open
        return [request for execution in found for request in execution.requests]

    @property
    def _open(self) -> Iterable[WorkerExecution]:
        return set(self._by_request.values())

    async def begin(
        self, requests: Sequence[InferRequest], indexes: Sequence[int]
    ) -> WorkerExecution:
        """Send requests to the worker; `indexes` are the scheduler's indexes of them.

        Raises InferenceError: INTERNAL without memory, NotSent once the worker has ended.
        """
        if _size(requests) < MUCH_BYTES:
            return self.begin_at_once(requests, indexes)
        tensors = TensorWriter(self._link.outgoing)
        try:
            write = partial(self._encoder.write, requests, tensors)
            described = await write_in_thread(write, tensors)
        except OSError as error:
            raise self._unwritten(tensors, error) from None
        return self._send(requests, indexes, tensors, described)

    def can_begin_at_once(self, request: InferRequest) -> bool:
        """Whether the request is small, and its answer need not wait for earlier ones."""
        return not self._backlog.unread and _size([request]) < MUCH_BYTES

    def begin_at_once(
        self, requests: Sequence[InferRequest], indexes: Sequence[int]
    ) -> WorkerExecution:
        """As `begin`, for small requests."""
        tensors = TensorWriter(self._link.outgoing)
        try:
            described = self._encoder.write(requests, tensors)
        except OSError as error:
            raise self._unwritten(tensors, error) from None
        return self._send(requests, indexes, tensors, described)

    def _unwritten(self, tensors: TensorWriter, error: OSError) -> InferenceError:
        """The error of requests whose tensors cannot be shared with the worker."""
        tensors.give_back()
        if self._ended is not None:
            return self._not_sent(self._ended)
        reason = f"no memory can be shared with its worker: {error.strerror}"
        return InferenceError(Code.INTERNAL, f"model '{self._encoder.model}': {reason}")

    def _send(
        self,
        requests: Sequence[InferRequest],
        indexes: Sequence[int],
        tensors: TensorWriter,
        described: list[Any],
    ) -> WorkerExecution:
        if self._ended is not None:
            raise self._not_sent(self._ended)
        # Numbers follow the order of sending: a worker ignores the cancellation of an unknown
        # number below its newest.
        number, first = self._next, self._next_request
        self._next, self._next_request = number + 1, first + len(requests)
        for each, numbered in enumerate(described, first):
            numbered[0] = each
        header = to_json([ToWorker.EXECUTE, number, described])
        execution = WorkerExecution(requests, indexes, self._backlog, number=number, first=first)
        self._by_number[number] = execution
        for each in execution.numbers:
            self._by_request[each] = execution
        self._link.release()
        self._link.work.send(header, tensors.body)
        if limit := self.limits.execute_timeout_secs:
            why = f"its execute took longer than {limit:g} s (execute_timeout_secs)"
            execution.timer = asyncio.get_running_loop().call_later(limit, self._owner.kill, why)
        if self._prefetch.allowed:
            self._last = execution
            self._free_if_room()
        return execution

    @staticmethod
    def _not_sent(ended: InferenceError) -> NotSent:
        return NotSent(ended.code, ended.message)

    def close_requests(self, requests: Sequence[InferRequest]) -> None:
        """Close these requests, though others of their execution may still be open."""
        for execution in self._open:
            if closed := execution.close_requests(requests):
                self._cancel(closed)
                execution.wake()

    def stop(self, request: InferRequest) -> None:
        """Cancel a request in the worker; its answers are still read."""
        for number, execution in self._by_request.items():
            if execution.request(number) is request:
                self._link.control.send(to_json([ToWorker.CANCEL, number]))
                return

    def is_abandoned(self, numbers: Sequence[int]) -> bool:
        """Whether a client of these requests has disconnected, and none of them is open."""
        return not self._disconnected.isdisjoint(numbers) and self._by_request.keys().isdisjoint(
            numbers
        )

    def request(self, number: int) -> InferRequest | None:
        """A request that is open."""
        execution = self._by_request.get(number)
        return None if execution is None else execution.request(number)

    @property
    def caller(self) -> Caller | None:
        """The caller of the open requests, if they are of one tenant."""
        open_ones = self._by_request.values()
        callers = (each.caller for execution in open_ones for each in execution.requests)
        first = next(callers, None)  # None on a server without API keys: no other is looked at
        are_of_one = first is not None and all(tenant_of(each) == first.tenant for each in callers)
        return first if are_of_one else None

    def release(self, execution: WorkerExecution) -> None:
        """Take back all that an execution holds: the only way in which one ends."""
        if numbers := execution.drop():
            self._cancel(numbers)
        if not execution.returned:
            self._limit_abandoned(execution)

    def _limit_abandoned(self, execution: WorkerExecution) -> None:
        limit, loop = self.limits.abandoned_execute_secs, asyncio.get_running_loop()
        if not limit or (
            execution.timer is not None and execution.timer.when() < loop.time() + limit
        ):
            return
        if execution.timer is not None:
            execution.timer.cancel()
        execution.timer = loop.call_later(limit, self._check_abandoned, execution)

    def _check_abandoned(self, execution: WorkerExecution) -> None:
        """Kill the worker if it is busy with an execution that was abandoned long ago.

        An execution that waits behind another one in the worker does not count.
        """
        execution.timer = None
        if next(iter(self._by_number.values()), None) is not execution:
            self._limit_abandoned(execution)
            return
        self._overdue = True
        limit = self.limits.abandoned_execute_secs
        self._owner.kill(
            f"its execute did not return within {limit:g} s after its clients had disconnected "
            "(abandoned_execute_secs)"
        )

    # Messages of the worker.

    def take_response(self, found: list[Any], body: memoryview) -> None:
        """RESPONSE: from a response sender, at any time."""
        _, number, described, final = found
        tensors = TensorReader(body, self._link.incoming)
        answer = read_response(described, tensors, final=final)
        self._answer(number, answer, tensors.size_bytes, len(tensors.segments), final=final)

    def take_executed(self, found: list[Any], body: memoryview) -> None:
        """EXECUTED: the answers that `execute` has returned."""
        _, number, error, returned, infer_ns = found
        tensors, phases = TensorReader(body, self._link.incoming), Phases(infer_ns=infer_ns)
        # All of it is read before any of it has an effect.
        answers = []
        for request, described, final, rescheduled in returned:
            before_bytes, before = tensors.size_bytes, len(tensors.segments)
            answer = read_response(described, tensors, final=final, phases=phases)
            weight = tensors.size_bytes - before_bytes, len(tensors.segments) - before
            answers.append((request, answer, weight, final, rescheduled))
        execution = self._by_number.pop(number)
        for request, answer, weight, final, rescheduled in answers:
            if rescheduled:
                self._reschedule(request)
            else:
                self._answer(request, answer, *weight, final=final)
        if error is not None:
            self._fail(execution, *error)
        execution.end()
        self._touched[execution] = None
        if self._prefetch.allowed:
            self._prefetch.measured(infer_ns)
            if self._last is execution:
                self._last = None
            self._free_if_room()

    def after_read(self) -> None:
        """After the frames of one read: wake readers, and hold the worker back."""
        # A reader without a task may begin the next execution meanwhile.
        touched, self._touched = self._touched, {}
        self._backlog.added(touched)
        self._link.release()

    def end(self, error: InferenceError) -> None:
        """The worker has ended: every request that is not done fails."""
        self._ended = error
        for execution in {*self._by_number.values(), *self._open}:
            execution.abort(error)
            execution.wake()
        self._by_number.clear()
        self._by_request.clear()
        self._disconnected.clear()

    def _answer(
        self,
        number: int,
        answer: InferResponse | InferenceError | None,
        size_bytes: int,
        segments: int,
        *,
        final: bool,
    ) -> None:
        """Add an answer, with the size of its tensors, to its request if that is open."""
        execution = self._by_request.get(number)
        if execution is None or answer is None:
            if final:
                self._disconnected.discard(number)
            return
        done = execution.answer(number, answer, ANSWER_BYTES + size_bytes, segments)
        done = done or (final and execution.answer(number, FLAG))
        if done:
            self._by_request.pop(number, None)
        if done or execution.unread:
            self._touched[execution] = None

    def _reschedule(self, number: int) -> None:
        execution = self._by_request.pop(number, None)
        if execution is not None:
            execution.reschedule(number)
        self._disconnected.discard(number)

    def _cancel(self, numbers: Sequence[int]) -> None:
        self._link.control.send(to_json([ToWorker.CANCEL, *numbers]))
        for number in numbers:
            del self._by_request[number]
        self._disconnected.update(numbers)
        self._owner.disconnected()

    def _free_if_room(self) -> None:
        """Free the instance for another execution, if only the last one occupies it."""
        if self._last is not None and self._prefetch.room(len(self._by_number)):
            self._last.free()
            self._touched[self._last] = None
            self._last = None

    def _fail(self, execution: WorkerExecution, message: str, trace: str) -> None:
        log.error("execute failed", extra={**self._about, "reason": message, "trace": trace})
        for number in execution.open:
            del self._by_request[number]
        self._disconnected.difference_update(execution.numbers)
        execution.fail(InferenceError(Code.INTERNAL, f"{self._failed}{message}"))


class ExecuteCall:
    """One call of `execute`: cancels its requests in the worker, also before they are sent.

    `cancelled`: at least one is.
    """

    __slots__ = ("_executions", "_requests", "cancelled")

    def __init__(self, requests: Sequence[InferRequest], executions: WorkerExecutions) -> None:
        self._requests: list[tuple[InferRequest, Cancellation | None]] = []
        self._executions = executions
        self.cancelled = False
        for request in requests:
            cancellation = request.cancellation
            self._requests.append((request, cancellation))
            if cancellation is not None:
                cancellation.subscribe(partial(self._cancel, request, cancellation), may_stop=True)

    def waited_for(self, indexes: Sequence[int]) -> Sequence[int]:
        """The indexes of requests whose clients have not disconnected."""
        found = [(index, self._requests[index][1]) for index in indexes]
        return [index for index, each in found if each is None or not each.cancelled]

    def catch_up(self) -> None:
        """Close and cancel requests that ended before they were sent to the worker."""
        for request, cancellation in self._requests:
            if cancellation is not None:
                self._cancel(request, cancellation)

    def _cancel(self, request: InferRequest, cancellation: Cancellation) -> None:
        self.cancelled = True
        if cancellation.cancelled:
            self._executions.close_requests([request])
        elif cancellation.stopping:
            self._executions.stop(request)


def _size(requests: Sequence[InferRequest]) -> int:
    """The approximate size of their inputs in bytes."""
    size = 0
    for request in requests:
        for tensor in request.inputs:
            size += len(tensor.data)
    return size
