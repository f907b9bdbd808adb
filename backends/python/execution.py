"""One execution of a worker, and the backlog of unread answers."""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from backends.python.codec import to_json
from backends.python.connection import WorkerConnection
from backends.python.worker.sluice_worker.protocol import ToWorker
from gateway.backend import Answer, Note
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse

HOLD_BYTES = 16 << 20
"""An execution with this many bytes of unread answers is held: its senders block.

The limit shrinks as other executions have more unread.
"""
HELD_BYTES = 256 << 20
"""With this many bytes of unread answers in all, the worker's socket is not read."""
HELD_SEGMENTS = 256
"""If the unread answers have this many segments of shared memory, an execution may have one."""
SHARES = 16
"""Divisor: one execution may fill this fraction of the free room."""


class WorkerExecution:
    """Requests sent to a worker together; one task reads their answers inside `async with`.

    The block ends when `execute` of model.py has returned, since the worker is busy until then.
    At its end `release` is called first, in every state: from then on the execution has no open
    request, no answer and no place in the order, and accepts none.

    `number` counts the executions of the worker. Its requests are numbered from `first` on;
    `indexes` are the scheduler's indexes of them. It has `returned` once `execute` has, or never
    will, and is `aborted` if the worker has ended. `unread_bytes`, `unread_segments` and `held` are
    the backlog's.
    """

    __slots__ = (
        "_answers",
        "_backlog",
        "_first",
        "_freed",
        "_open",
        "_release",
        "_waiter",
        "aborted",
        "held",
        "number",
        "released",
        "requests",
        "returned",
        "timer",
        "unread_bytes",
        "unread_segments",
    )

    def __init__(
        self,
        requests: Sequence[InferRequest],
        indexes: Sequence[int],
        backlog: "Backlog",
        release: "Callable[[WorkerExecution], None]",
        *,
        number: int,
        first: int,
    ) -> None:
        self.requests = requests
        self.number = number
        self.returned = False
        self.released = False
        self.aborted = False
        self.held = False
        self.unread_bytes = self.unread_segments = 0
        self.timer: asyncio.TimerHandle | None = None
        self._backlog = backlog
        self._release = release
        self._first = first
        self._freed = False
        self._open = dict(enumerate(indexes, first))
        self._answers: list[Answer] = []
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release(self)
        while not self.returned:
            await self._change()

    @property
    def over(self) -> bool:
        """Whether all answers have arrived and the worker could take another execution."""
        return self.returned and not self._open

    @property
    def numbers(self) -> range:
        """The numbers of its requests."""
        return range(self._first, self._first + len(self.requests))

    def request(self, number: int) -> InferRequest:
        """The request of that number."""
        return self.requests[number - self._first]

    @property
    def open(self) -> list[int]:
        """The numbers of the requests that are not done."""
        return list(self._open)

    async def answers(self) -> list[Answer]:
        """All arrived answers, at least one; none once it is over."""
        while not self._answers or self._backlog.has_earlier(self):
            if self.over and not self._answers:
                return []
            await self._change()
        answers, self._answers = self._answers, []
        self._backlog.read(self)
        return answers

    # For the worker.

    def answer(
        self,
        number: int,
        answer: InferResponse | InferenceError,
        size_bytes: int = 0,
        segments: int = 0,
    ) -> bool:
        """Add an answer to an open request, with its size; returns whether the request is done."""
        self._add(self._open[number], answer)
        self.unread_bytes += size_bytes
        self.unread_segments += segments
        self._backlog.add(size_bytes, segments)
        if isinstance(answer, InferenceError) or answer.final:
            del self._open[number]
            return True
        return False

    def reschedule(self, number: int) -> None:
        """Mark an open request to be executed again."""
        self._add(self._open.pop(number), Note.RESCHEDULED)

    def end(self) -> None:
        """Mark that `execute` has returned; open requests are answered later."""
        self._return()
        if self._open:
            self.free()

    def free(self) -> None:
        """Allow another execution in the worker."""
        if not self._freed:
            self._freed = True
            self._add(0, Note.FREED)

    def abort(self, error: InferenceError) -> None:
        """Fail every request that is not done: the worker has ended."""
        self.aborted = True
        self.fail(error)
        self._return()

    def fail(self, error: InferenceError) -> None:
        """Fail every request that is not done."""
        for index in self._open.values():
            self._add(index, error)
        self._open.clear()

    def close_requests(self, requests: Sequence[InferRequest]) -> list[int]:
        """Close these requests; returns the numbers of the open ones among them."""
        closed = [n for n in self._open if any(self.request(n) is each for each in requests)]
        for number in closed:
            del self._open[number]
        return closed

    def drop(self) -> None:
        """Close every request, and drop every answer, later ones included."""
        self.released = True
        self._open.clear()
        self._answers = []
        self._backlog.read(self)

    def wake(self) -> None:
        """Wake the reader."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _add(self, index: int, answer: InferResponse | InferenceError | Note) -> None:
        if self.released:
            return
        if not self._answers:
            self._backlog.enter(self)
        self._answers.append((index, answer))

    def _return(self) -> None:
        self.returned = True
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    async def _change(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


class Backlog:
    """Unread answers of all executions of one worker, and the back-pressure that they cause.

    If they are `ordered`, an execution is read when no earlier one has unread answers.
    """

    def __init__(self, link: WorkerConnection, *, ordered: bool) -> None:
        self._link = link
        self._ordered = ordered
        self._unread: dict[WorkerExecution, None] = {}
        self.unread_bytes = 0
        self._segments = 0

    def has_earlier(self, execution: WorkerExecution) -> bool:
        """Whether answers must be read before those of this execution."""
        if not self._ordered or len(self._unread) < 2:
            return False
        return any(each.number < execution.number for each in self._unread)

    def enter(self, execution: WorkerExecution) -> None:
        """Add an execution with a first unread answer."""
        self._unread[execution] = None

    def add(self, size_bytes: int, segments: int) -> None:
        """Add the size of an unread answer."""
        self.unread_bytes += size_bytes
        self._segments += segments

    def read(self, execution: WorkerExecution) -> None:
        """Remove an execution whose answers have been read or dropped; the worker may continue."""
        if execution not in self._unread:
            return
        del self._unread[execution]
        self.unread_bytes -= execution.unread_bytes
        self._segments -= execution.unread_segments
        execution.unread_bytes = execution.unread_segments = 0
        if execution.held:
            execution.held = False
            self._send(ToWorker.GO_ON, execution)
        if self.unread_bytes < HELD_BYTES:
            self._link.work.resume()
        if self._ordered:
            for each in self._unread:
                each.wake()

    def hold(self, execution: WorkerExecution) -> None:
        """Hold an execution with too much unread; the limit shrinks as the total grows.

        So executions with stopped readers never fill the room of the others.
        """
        if execution.held or not execution.unread_bytes:
            return
        left_bytes, left = HELD_BYTES - self.unread_bytes, HELD_SEGMENTS - self._segments
        most_bytes = max(1, min(HOLD_BYTES, left_bytes // SHARES))
        most_segments = max(1, left // SHARES)
        if execution.unread_bytes >= most_bytes or execution.unread_segments >= most_segments:
            execution.held = True
            self._send(ToWorker.HOLD, execution)

    def pause(self) -> None:
        """Stop reading from the worker if too much is unread in all."""
        if self.unread_bytes >= HELD_BYTES:
            self._link.work.pause()

    def _send(self, kind: ToWorker, execution: WorkerExecution) -> None:
        if numbers := execution.open:
            self._link.control.send(to_json([kind, *numbers]))
