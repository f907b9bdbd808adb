"""One execution of a worker, the backlog of unread answers, and quarantined requests."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from backends.python.codec import to_json
from backends.python.connection import WorkerConnection
from backends.python.worker.sluice_worker.protocol import ToWorker
from gateway.backend import Answer, Note
from gateway.errors import Code, InferenceError
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

log = logging.getLogger("sluice.python")
DEATHS = 2
"""A request is refused after it was executing at the end of this many workers."""
KEPT_SECS = 600.0
MOST = 1024
"""Of more suspects the oldest are forgotten."""


class WorkerExecution:
    """Requests sent to a worker together; one task reads their answers.

    In every state the task calls `WorkerExecutions.release` at its end: from then on the execution
    has no open request, no answer and no place in the order, and accepts none. The worker is busy
    until `execute` of model.py has returned.

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
        self._answers: list[Answer] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        """Whether all answers have arrived and the worker could take another execution."""
        return self.returned and not self._open

    @property
    def has_more(self) -> bool:
        """Whether there are answers to read, or may be later."""
        return not self.returned or bool(self._answers or self._open)

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
        backlog = self._backlog
        while not self._answers or (len(backlog.unread) > 1 and backlog.has_earlier(self)):
            if self.over and not self._answers:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        answers, self._answers = self._answers, []
        backlog.read(self)
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
        index = self._open[number]
        self._backlog.add(self, size_bytes, segments)
        self._answers.append((index, answer))
        self.unread_bytes += size_bytes
        self.unread_segments += segments
        if isinstance(answer, InferenceError) or answer.final:
            del self._open[number]
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
        if self._answers:
            self._answers = []
            self._backlog.read(self)
        return dropped

    def wake(self) -> None:
        """Wake the reader."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _add(self, index: int, answer: InferResponse | InferenceError | Note) -> None:
        if self.released:
            return
        self._backlog.add(self)
        self._answers.append((index, answer))


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
        self._paused = False

    def has_earlier(self, execution: WorkerExecution) -> bool:
        """Whether answers must be read before those of this execution."""
        return self._ordered and min([each.number for each in self.unread]) < execution.number

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
        if self._paused and self.unread_bytes < HELD_BYTES:
            self._paused = False
            self._link.work.resume()
        if self._ordered:
            for each in self.unread:
                each.wake()

    def added(self, executions: Iterable[WorkerExecution]) -> None:
        """After the answers of one read: wake their readers, and hold back the worker."""
        few = self.unread_bytes < FEW_BYTES and self._segments < FEW_SEGMENTS
        for execution in executions:
            execution.wake()
            if not few:
                self._hold(execution)
        if self.unread_bytes >= HELD_BYTES:
            self._paused = True
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


@dataclass(slots=True)
class Suspect:
    """`deaths` so far, the last of them at `seen`; `size` is that of the request's inputs."""

    deaths: int
    seen: float
    size: int


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Indexes of an execution's requests: `groups` execute in turn, `refused` do not execute."""

    groups: Sequence[Sequence[int]]
    refused: Sequence[tuple[int, InferenceError]] = ()


_together = cache(lambda count: ExecutionPlan((range(count),)))


class Quarantine:
    """Suspects by their content, for ten minutes after the last worker that they ended.

    All requests of an execution become suspects when its worker ends. A suspect then executes
    alone, so a second end proves it guilty, and an answer clears it. `load` identifies the state
    of a model's files.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.suspects: dict[bytes, Suspect] = {}
        self._sizes: set[int] = set()

    def plan(self, load: bytes, requests: Sequence[InferRequest]) -> ExecutionPlan:
        """Groups for the requests of an execution; one group if there is no suspect."""
        if not self.suspects:
            return _together(len(requests))
        self._forget_old()
        together: list[int] = []
        alone: list[tuple[int]] = []
        refused = []
        for index, request in enumerate(requests):
            suspect = self._find(load, request)
            if suspect is None:
                together.append(index)
            elif suspect.deaths < DEATHS:
                alone.append((index,))
            else:
                refused.append((index, _refusal(request)))
        return ExecutionPlan([*([together] if together else []), *alone], refused)

    def died(self, load: bytes, requests: Sequence[InferRequest]) -> None:
        """Mark requests as suspects: their worker has ended."""
        for request in requests:
            key = _fingerprint(load, request)
            before = self.suspects.pop(key, None)
            deaths = 1 + (0 if before is None else before.deaths)
            self.suspects[key] = Suspect(deaths, self._clock(), _size(request))
            if deaths >= DEATHS:
                extra = {"model": request.model, "id": request.id, "workers_ended": deaths}
                log.error("request quarantined", extra={**extra, "secs": KEPT_SECS})
        while len(self.suspects) > MOST:
            del self.suspects[next(iter(self.suspects))]
        self._note_sizes()

    def survived(self, load: bytes, requests: Sequence[InferRequest]) -> None:
        """Clear requests: their worker has executed them and is alive."""
        for request in requests:
            if self._find(load, request) is not None:
                del self.suspects[_fingerprint(load, request)]
        self._note_sizes()

    def _find(self, load: bytes, request: InferRequest) -> Suspect | None:
        # Most requests need not be hashed: no suspect has as many bytes.
        if _size(request) not in self._sizes:
            return None
        return self.suspects.get(_fingerprint(load, request))

    def _forget_old(self) -> None:
        oldest = self._clock() - KEPT_SECS
        self.suspects = {k: s for k, s in self.suspects.items() if s.seen > oldest}
        self._note_sizes()

    def _note_sizes(self) -> None:
        self._sizes = {suspect.size for suspect in self.suspects.values()}


def _size(request: InferRequest) -> int:
    return sum([len(tensor.raw()) for tensor in request.inputs])


def _fingerprint(load: bytes, request: InferRequest) -> bytes:
    """A hash of inputs and parameters, which are all that a suspect is identified by."""
    found = hashlib.blake2b(load, digest_size=16)
    for tensor in request.inputs:
        data = tensor.raw()
        found.update(repr((tensor.name, tensor.datatype, tensor.shape, len(data))).encode())
        found.update(data)
    found.update(repr(sorted(request.parameters.items())).encode(errors="surrogatepass"))
    return found.digest()


def _refusal(request: InferRequest) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f"model '{request.model}' does not execute this request: its worker ended {DEATHS} times "
        f"while executing one with the same inputs and parameters; it is refused for "
        f"{KEPT_SECS / 60:g} minutes",
    )
