"""One execution of a worker, the backlog of unread answers, and prefetched executions."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from backends.python.codec import to_json
from backends.python.connection import WorkerConnection
from backends.python.worker.sluice_worker.protocol import ToWorker
from gateway.backend import Answer, Note
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse

HOLD_BYTES = 16 << 20
"""An execution with this much unread is held: senders block. It shrinks as others have more."""
HELD_BYTES = 256 << 20
"""With this many bytes of unread answers in all, the worker's socket is not read."""
HELD_SEGMENTS = 256
"""If the unread answers have this many segments of shared memory, an execution may have one."""
SHARES = 16
"""Divisor: one execution may fill this fraction of the free room."""
FEW_BYTES, FEW_SEGMENTS = HOLD_BYTES // 2, HELD_SEGMENTS // SHARES // 2
"""With less unread in all, no execution can be at its limit."""
SHORT_NS = 500_000
AT_ONCE = 4
NEWEST = 0.25
"""Weight of the newest execution in the moving average."""


class WorkerExecution:
    """Requests sent to a worker together; one task reads their answers.

    In every state the task calls `WorkerExecutions.release` at its end: from then on the execution
    has no open request, no answer and no place in the order, and accepts none. The worker is busy
    until `execute` of model.py has returned.

    The answers of a single request go to its sink while the task waits for them; the task reads
    the others, errors among them. Instead of a task `listener` may be called when it would wake.
    `failure` is an exception of the reader of a sink.

    `number` counts the executions of the worker. Its requests are numbered from `first` on;
    `indexes` are the scheduler's indexes of them. It has `returned` once `execute` has, or never
    will, and is `aborted` if the worker has ended. `unread_bytes`, `unread_segments` and `held` are
    the backlog's.
    """

    __slots__ = (
        "_backlog",
        "_first",
        "_freed",
        "_open",
        "_sink",
        "_waiter",
        "aborted",
        "failure",
        "held",
        "listener",
        "number",
        "released",
        "requests",
        "returned",
        "timer",
        "unread",
        "unread_bytes",
        "unread_segments",
    )

    def __init__(
        self,
        requests: Sequence[InferRequest],
        indexes: Sequence[int],
        backlog: "Backlog",
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
        self._first = first
        self._freed = False
        self._open = dict(enumerate(indexes, first))
        self._sink = requests[0].sink if len(requests) == 1 else None
        self.unread: list[Answer] = []
        self._waiter: asyncio.Future[None] | None = None
        self.failure: Exception | None = None
        self.listener: Callable[[], None] | None = None

    @property
    def over(self) -> bool:
        """Whether all answers have arrived and the worker could take another execution."""
        return self.returned and not self._open

    @property
    def has_more(self) -> bool:
        """Whether there are answers to read, or may be later."""
        return bool(self.unread) or self.failure is not None or not self.over

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
        """All arrived answers, at least one; none once it is over.

        Raises the exception of a reader that took an answer from the sink.
        """
        while not (answers := self.take()):
            if self.failure is not None:
                raise self.failure
            if self.over and not self.unread:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return answers

    def take(self) -> list[Answer]:
        """All arrived answers; none while those of an earlier execution are unread."""
        if not self.unread or self._backlog.has_earlier(self):
            return []
        answers, self.unread = self.unread, []
        self._backlog.read(self)
        return answers

    async def until_returned(self) -> None:
        """Wait until `execute` has returned."""
        while not self.returned:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    # For the worker.

    def answer(
        self,
        number: int,
        answer: InferResponse | InferenceError,
        size_bytes: int = 0,
        segments: int = 0,
    ) -> bool:
        """Add an answer to an open request, with its size; returns whether the request is done."""
        index, backlog = self._open.get(number), self._backlog
        if index is None:
            return False  # its reader has disconnected because of the answer before
        sink, waiter = self._sink, self._waiter
        if (
            sink is not None
            and isinstance(answer, InferResponse)
            and (self.listener is not None or (waiter is not None and not waiter.done()))
            and not backlog.unread
            and sink.has_room
        ):
            try:
                sink.put(answer)
            except Exception as error:  # noqa: BLE001 - of the reader; raised by the task
                self.failure = error
                self.wake()
        else:
            backlog.add(self, size_bytes, segments)
            self.unread.append((index, answer))
            self.unread_bytes += size_bytes
            self.unread_segments += segments
        if isinstance(answer, InferenceError) or answer.final:
            self._open.pop(number, None)
            return True
        return False

    def reschedule(self, number: int) -> None:
        """Mark an open request to be executed again."""
        self._add(self._open.pop(number), Note.RESCHEDULED)

    def end(self) -> None:
        """Mark that `execute` has returned, or never will; open requests are answered later."""
        self.returned = True
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
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
        self.end()

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

    def drop(self) -> list[int]:
        """Close every request, and drop every answer, later ones included.

        Returns the numbers of the requests that were open.
        """
        self.released = True
        dropped = list(self._open)
        self._open.clear()
        if self.unread:
            self.unread = []
            self._backlog.read(self)
        return dropped

    def wake(self) -> None:
        """Wake the reader."""
        if self.listener is not None:
            self.listener()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _add(self, index: int, answer: InferResponse | InferenceError | Note) -> None:
        if self.released:
            return
        self._backlog.add(self)
        self.unread.append((index, answer))


class Backlog:
    """Unread answers of all executions of one worker, and the back-pressure that they cause.

    If they are `ordered`, an execution is read when no earlier one has unread answers.
    """

    def __init__(self, link: WorkerConnection, *, ordered: bool) -> None:
        self._link = link
        self._ordered = ordered
        self.unread: dict[WorkerExecution, None] = {}
        self.unread_bytes = 0
        self._segments = 0

    def has_earlier(self, execution: WorkerExecution) -> bool:
        """Whether answers must be read before those of this execution."""
        if not self._ordered or len(self.unread) < 2:
            return False
        return min([each.number for each in self.unread]) < execution.number

    def add(self, execution: WorkerExecution, size_bytes: int = 0, segments: int = 0) -> None:
        """Add an unread answer of an execution, with its size."""
        self.unread[execution] = None
        self.unread_bytes += size_bytes
        self._segments += segments

    def read(self, execution: WorkerExecution) -> None:
        """Remove an execution whose answers have been read or dropped; the worker may continue."""
        del self.unread[execution]
        self.unread_bytes -= execution.unread_bytes
        self._segments -= execution.unread_segments
        execution.unread_bytes = execution.unread_segments = 0
        if execution.held:
            execution.held = False
            self._send(ToWorker.GO_ON, execution)
        if self.unread_bytes < HELD_BYTES:
            self._link.work.resume()
        if self._ordered:
            for each in tuple(self.unread):  # readers without a task read at once
                each.wake()

    def added(self, executions: Iterable[WorkerExecution]) -> None:
        """After the answers of one read: wake their readers, and hold back the worker."""
        few = self.unread_bytes < FEW_BYTES and self._segments < FEW_SEGMENTS
        for execution in executions:
            execution.wake()
            if not few:
                self._hold(execution)
        if self.unread_bytes >= HELD_BYTES:
            self._link.work.pause()

    def _hold(self, execution: WorkerExecution) -> None:
        # The limit shrinks as the total grows: stopped readers never fill the room of the others.
        if execution.held or not execution.unread_bytes:
            return
        left_bytes, left = HELD_BYTES - self.unread_bytes, HELD_SEGMENTS - self._segments
        most_bytes = max(1, min(HOLD_BYTES, left_bytes // SHARES))
        most_segments = max(1, left // SHARES)
        if execution.unread_bytes >= most_bytes or execution.unread_segments >= most_segments:
            execution.held = True
            self._send(ToWorker.HOLD, execution)

    def _send(self, kind: ToWorker, execution: WorkerExecution) -> None:
        if numbers := execution.open:
            self._link.control.send(to_json([kind, *numbers]))


class Prefetch:
    """Allows one more execution in a busy worker, if executions are short and few wait there.

    The way to a worker and back takes longer than a small model: with the next request already
    there, the worker need not wait for it. It still executes one after the other. `allowed` is
    False for models whose executions must not be formed early.
    """

    __slots__ = ("_typical_ns", "allowed")

    def __init__(self, *, allowed: bool) -> None:
        self.allowed = allowed
        self._typical_ns: float | None = None

    def measured(self, infer_ns: int) -> None:
        """Add the duration of an `execute`."""
        typical = infer_ns if self._typical_ns is None else self._typical_ns
        self._typical_ns = typical + NEWEST * (infer_ns - typical)

    def room(self, busy: int) -> bool:
        """Whether a worker with `busy` executions may get one more."""
        typical = self._typical_ns
        return self.allowed and typical is not None and typical < SHORT_NS and busy < AT_ONCE
