"""The executions of one worker: handed over, answered, held back, and ended."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from backends.python.execution import Execution
from backends.python.link import Link
from backends.python.overlap import Overlap
from backends.python.requests import RequestEncoder, to_json
from backends.python.responses import read_response
from backends.python.tensors import MUCH_BYTES, TensorReader, TensorWriter, beside
from backends.python.worker.sluice_worker.messages import ToWorker
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, Phases

log = logging.getLogger("sluice.python")

HOLD_BYTES = 16 << 20
"""Once so many bytes of answers to one execution wait to be taken, whoever sends them must wait.

It is sooner once much waits of others.
"""
HELD_BYTES = 256 << 20
"""Once so many bytes of all answers wait to be taken, the worker is read no further."""
SHARES = 16
"""Which part of the room that is left one execution may fill."""
ANSWER_BYTES = 64 << 10
"""What an answer weighs besides its tensors."""
FLAG = InferResponse(final=True)
"""That no more will come."""


class Executions:
    """Those that a worker has not ended; each request has a number of its own in them."""

    def __init__(
        self, encoder: RequestEncoder, name: str, link: Link, about: Mapping[str, object]
    ) -> None:
        self._encoder = encoder
        self._overlap = Overlap(allowed=encoder.alone)
        self._failed = f"Failed to process the request(s) for model '{name}', message: "
        self._link = link
        self._about = about
        self._by_number: dict[int, Execution] = {}
        self._by_request: dict[int, Execution] = {}
        self._left: set[int] = set()
        self._touched: dict[Execution, None] = {}
        self._next = 1
        self._next_request = 1
        self._held = 0
        self._last: Execution | None = None
        self._latest: Execution | None = None
        self._ended: InferenceError | None = None

    @property
    def model(self) -> str:
        """The model's name."""
        return self._encoder.model

    @property
    def busy(self) -> bool:
        """Whether `execute` has not returned."""
        return bool(self._by_number)

    @property
    def suspects(self) -> list[InferRequest]:
        """The requests that `execute` is busy with, or else all that are open."""
        found = tuple(self._by_number.values())[:1] or self._open
        return [request for execution in found for request in execution.requests]

    @property
    def _open(self) -> Iterable[Execution]:
        return set(self._by_request.values())

    async def begin(self, requests: Sequence[InferRequest], indexes: Sequence[int]) -> Execution:
        """Hand requests to the worker; `indexes` are how their answers are to be told.

        Raises InferenceError: UNAVAILABLE once the worker has ended, INTERNAL without memory.
        """
        number, first = self._next, self._next_request
        self._next, self._next_request = number + 1, first + len(requests)
        tensors = TensorWriter(self._link.outgoing)
        encode = partial(self._encoder.encode, number, first, requests, tensors)
        try:
            header = encode() if _size(requests) < MUCH_BYTES else await beside(encode, tensors)
        except OSError as error:
            tensors.give_back()
            if self._ended is not None:
                raise self._ended from None
            reason = f"no memory can be shared with its worker: {error.strerror}"
            raise InferenceError(
                Code.INTERNAL, f"model '{self._encoder.model}': {reason}"
            ) from None
        if self._ended is not None:
            raise self._ended
        execution = self._latest = Execution(requests, first, indexes, self._before())
        self._by_number[number] = execution
        for request in execution.open:
            self._by_request[request] = execution
        self._link.release()
        self._link.work.send(header, tensors.body)
        self._last = execution
        self._free_if_room()
        return execution

    def taken(self, execution: Execution) -> None:
        """Its answers have been taken."""
        if execution is self._latest and execution.settled:
            self._latest = None  # it would keep its requests until the next one
        if execution.weight:
            self._held -= execution.weight
            execution.weight = 0
            if execution.held:
                execution.held = False
                self._tell(ToWorker.GO_ON, execution.open)
            if self._held < HELD_BYTES:
                self._link.work.resume()

    def leave(self, execution: Execution) -> None:
        """Nobody waits for its answers; the worker is told, and may say what it likes."""
        self._cancel(execution.open)
        execution.abandon()
        self.taken(execution)

    def leave_some(self, requests: Sequence[InferRequest]) -> None:
        """Nobody waits for these, though others of their execution may still be waited for."""
        for execution in self._open:
            if left := execution.leave(requests):
                self._cancel(left)
                execution.wake()

    def is_left(self, numbers: Sequence[int]) -> bool:
        """Whether requests have been left, and none of them is waited for any more."""
        return not self._left.isdisjoint(numbers) and self._by_request.keys().isdisjoint(numbers)

    def request(self, number: int) -> InferRequest | None:
        """A request that is waited for."""
        execution = self._by_request.get(number)
        return None if execution is None else execution.request(number)

    def is_first(self, execution: Execution) -> bool:
        """Whether it is the one that the worker executes; others lie before it until then."""
        return next(iter(self._by_number.values()), None) is execution

    # What the worker says.

    def take_response(self, found: list[Any], body: memoryview) -> None:
        """RESPONSE: from a response sender, at any time."""
        _, number, described, final = found
        answer = _read(described, TensorReader(body, self._link.incoming), final=final)
        self._answer(number, answer, final=final)

    def take_executed(self, found: list[Any], body: memoryview) -> None:
        """EXECUTED: what `execute` has returned."""
        _, number, error, returned, infer_ns = found
        execution = self._by_number.pop(number)
        tensors, phases = TensorReader(body, self._link.incoming), Phases(infer_ns=infer_ns)
        for request, described, final, rescheduled in returned:
            if rescheduled:
                self._reschedule(request)
            else:
                answer = _read(described, tensors, final=final, phases=phases)
                self._answer(request, answer, final=final)
        if error is not None:
            self._fail(execution, *error)
        execution.end()
        self._touch(execution)
        self._overlap.measured(infer_ns)
        if self._last is execution:
            self._last = None
        self._free_if_room()

    def after_read(self) -> None:
        """All that came at once has been told: wake whoever waits, and hold the worker back."""
        for execution in self._touched:
            execution.wake()
            if execution.weight >= self._share() and not execution.held:
                execution.held = True
                self._tell(ToWorker.HOLD, execution.open)
        self._touched.clear()
        self._link.release()
        if self._held >= HELD_BYTES:
            self._link.work.pause()

    def end(self, error: InferenceError) -> None:
        """The worker has ended: every request that is not done fails."""
        self._ended = error
        for execution in {*self._by_number.values(), *self._open}:
            execution.lose(error)
            execution.wake()
        self._by_number.clear()
        self._by_request.clear()
        self._left.clear()

    def _answer(
        self, number: int, answer: InferResponse | InferenceError | None, *, final: bool
    ) -> None:
        execution = self._by_request.get(number)
        if execution is None or answer is None:
            if final:
                self._left.discard(number)
            return
        weight = ANSWER_BYTES + _weight(answer)
        done = execution.answer(number, answer, weight)
        if done or (final and execution.answer(number, FLAG, 0)):
            del self._by_request[number]
        self._held += weight
        self._touch(execution)

    def _reschedule(self, number: int) -> None:
        execution = self._by_request.pop(number, None)
        if execution is not None:
            execution.reschedule(number)
        self._left.discard(number)

    def _cancel(self, numbers: Sequence[int]) -> None:
        self._tell(ToWorker.CANCEL, numbers)
        for number in numbers:
            del self._by_request[number]
        self._left.update(numbers)

    def _tell(self, kind: ToWorker, numbers: Sequence[int]) -> None:
        if numbers:
            self._link.control.send(to_json([kind, *numbers]))

    def _touch(self, execution: Execution) -> None:
        self._touched[execution] = None

    def _before(self) -> Execution | None:
        """The one whose answers must be taken before those of the next: clients expect an order.

        A decoupled model has none, and must not be held back by one of its readers.
        """
        latest = self._latest
        if latest is None or latest.settled or self._encoder.decoupled:
            return None
        return latest

    def _free_if_room(self) -> None:
        """Let the instance have another execution, if only the last one keeps it."""
        if self._last is not None and self._overlap.room(len(self._by_number)):
            self._last.free()
            self._touch(self._last)
            self._last = None

    def _share(self) -> int:
        """How much of one execution may wait: less, the more waits of all.

        So those whose readers have stopped never fill the room that the others need.
        """
        return max(1, min(HOLD_BYTES, (HELD_BYTES - self._held) // SHARES))

    def _fail(self, execution: Execution, message: str, trace: str) -> None:
        log.error("execute failed", extra={**self._about, "reason": message, "trace": trace})
        for number in execution.open:
            del self._by_request[number]
        self._left.difference_update(execution.numbers)
        execution.fail(InferenceError(Code.INTERNAL, f"{self._failed}{message}"))


def _read(
    described: list[Any] | None,
    tensors: TensorReader,
    *,
    final: bool,
    phases: Phases | None = None,
) -> InferResponse | InferenceError | None:
    """What was sent for a request; None if that is nothing yet."""
    if described is not None:
        return read_response(described, tensors, final=final, phases=phases)
    return InferResponse(final=True) if final else None


def _size(requests: Sequence[InferRequest]) -> int:
    """About how many bytes their inputs have."""
    return sum([len(tensor.data) for request in requests for tensor in request.inputs])


def _weight(answer: InferResponse | InferenceError) -> int:
    if isinstance(answer, InferenceError):
        return 0
    return sum([len(tensor.data) for tensor in answer.outputs])
