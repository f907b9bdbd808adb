"""Business logic: models that ask other models, as often and as many at once as they like."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any

from .calls import Answered
from .current import Stage, Worker, worker
from .errors import TritonModelException
from .messages import ToGateway
from .packing import Packing
from .response import InferenceResponse
from .tensor import Tensor

SERVED: ContextVar[Sequence[Any]] = ContextVar("SERVED", default=())
"""The headers of the requests on whose behalf this code runs; none in threads of model.py's own."""


class ResponseIterator:
    """The responses of another model, as they come; once all have come it starts over."""

    def __init__(self, asked: Worker) -> None:
        self._worker = asked
        self._arrived: SimpleQueue[tuple[InferenceResponse, bool]] = SimpleQueue()
        self._responses: list[InferenceResponse] = []
        self._position = 0
        self._ended = False
        self._cancelled = False
        self.number = asked.calls.begin(_put_into(self._arrived))

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        if self._position == len(self._responses):
            self._receive()
        self._position += 1
        return self._responses[self._position - 1]

    def cancel(self) -> None:
        """Nobody will read more; what is under way ends with the model's last response."""
        if not self._ended and not self._cancelled:
            self._cancelled = True
            self._worker.connection.send([ToGateway.CANCEL_INFER, self.number])

    def _receive(self) -> None:
        if self._ended:
            self._position = 0
            raise StopIteration
        response, final = self._arrived.get()
        self._responses.append(response)
        self._ended = final

    def __del__(self) -> None:
        if not self._ended and not self._cancelled:
            self._worker.connection.send_from_finalizer([ToGateway.CANCEL_INFER, self.number])


def ask(header: list[Any], inputs: Sequence[Tensor], decoupled: bool) -> Any:
    """Ask another model: its response, or an iterator over its responses."""
    asked = _allowed()
    question = _Question(asked, header, inputs, decoupled)
    if decoupled:
        responses = ResponseIterator(asked)
        question.send(responses.number)
        return responses
    arrived: SimpleQueue[tuple[InferenceResponse, bool]] = SimpleQueue()
    over_work = asked.work.is_read_here
    question.send(asked.calls.begin(_put_into(arrived)), over_work=over_work)
    response, _ = asked.work.wait(arrived) if over_work else arrived.get()
    return response


def ask_soon(header: list[Any], inputs: Sequence[Tensor], decoupled: bool) -> Any:
    """Ask another model; a future of what `ask` returns, in the loop that runs here."""
    asked = _allowed()
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    if decoupled:
        future.set_result(ask(header, inputs, decoupled))
        return future

    def settle(response: InferenceResponse) -> None:
        if not future.done():
            future.set_result(response)

    def answered(response: Any, _: bool) -> None:
        # The loop may have been closed: then nobody waits for the answer.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, response)

    question = _Question(asked, header, inputs, decoupled)
    number = asked.calls.begin(answered)
    future.add_done_callback(lambda done: _cancelled(asked, number, done))
    question.send(number)
    return future


def _allowed() -> Worker:
    found = worker()
    if found.stage is not Stage.SERVING:
        raise TritonModelException("BLS is only supported during the 'execute' function.")
    return found


def _put_into(queue: "SimpleQueue[tuple[InferenceResponse, bool]]") -> Answered:
    def answered(response: Any, final: bool) -> None:
        queue.put((response, final))

    return answered


def _cancelled(asked: Worker, number: int, future: "asyncio.Future[Any]") -> None:
    if future.cancelled():
        asked.connection.send([ToGateway.CANCEL_INFER, number])


class _Question:
    """A request to another model, packed: what fails before it is sent leaves nothing behind."""

    def __init__(
        self, asked: Worker, header: list[Any], inputs: Sequence[Tensor], decoupled: bool
    ) -> None:
        self._connection, self._decoupled = asked.connection, decoupled
        self._packing = Packing(asked.connection)
        try:
            self._request = [*header, [self._packing.tensor(each) for each in inputs]]
        except BaseException:
            self._packing.give_back()
            raise

    def send(self, number: int, *, over_work: bool = False) -> None:
        served = [each[0] for each in SERVED.get()]
        header = [ToGateway.INFER, number, self._request, self._decoupled, served, over_work]
        self._connection.send(header, self._packing.buffers)
