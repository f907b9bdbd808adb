"""The socket for executions, calls that wait for the gateway, and the state of this process."""

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from queue import SimpleQueue
from typing import Any

from .connection import Buffer, GatewayConnection, Unpacking, end_group, parsed
from .errors import TritonModelException
from .protocol import FrameSplitter, ToGateway, ToWorker

Answered = Callable[[Any, bool], None]
"""Gets each answer, and whether it is the last."""


class GatewayCalls:
    """Calls to the gateway by number, and the receivers of their answers; for any thread."""

    instance = ""

    def __init__(self, connection: GatewayConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Answered] = {}

    def begin(self, answered: Answered) -> int:
        """The number of a new call; `answered` gets its answers, in the thread that reads them."""
        number = next(self._numbers)
        self._waiting[number] = answered
        return number

    def ask(self, kind: ToGateway, *values: Any, buffers: Sequence[Buffer] = ()) -> Any:
        """Send a call and wait for its value; TritonModelException has the gateway's error text."""
        answers: SimpleQueue[tuple[str | None, Any]] = SimpleQueue()
        number = self.begin(lambda answer, _: answers.put(answer))
        self._connection.send([kind, number, *values], buffers)
        error, value = answers.get()
        if error is not None:
            raise TritonModelException(self.refused(error))
        return value

    def refused(self, reason: str) -> str:
        """The server's reason in the form in which Triton passes it to a model."""
        return f"Failed to process the request for model '{self.instance}', message: {reason}"

    def answer(self, number: int, answer: Any, final: bool) -> None:
        """Pass an answer to the receiver of its call."""
        answered = self._waiting.pop(number, None) if final else self._waiting.get(number)
        if answered is not None:
            answered(answer, final)


Message = tuple[list[Any], memoryview]
"""Header and body."""
AWAKE_NS = 300_000
"""If the last answer of another model came soon, the wait for one polls this long before it sleeps.

Waking a sleeping process is slow; polling yields the processor to other threads. The wait for
requests does not poll: it lasts longer than an execution, and would take more processor time."""


class WorkSocket:
    """Messages over `work`: executions in their order, and answers of other models."""

    def __init__(self, connection: GatewayConnection, calls: GatewayCalls) -> None:
        self._connection, self._calls = connection, calls
        self._frames = FrameSplitter()
        self._messages: deque[Message] = deque()
        self._came_soon = False
        self._waits = self._is_watched = False

    def next(self) -> Message | None:
        """The next message; None if the gateway has closed the socket."""
        while not self._messages:
            if not self._read(poll=False):
                return None
        return self._messages.popleft()

    def watch(self) -> None:
        """Let the reader wait so that `drained` can be asked: one more system call per message."""
        self._is_watched = True

    @property
    def drained(self) -> bool:
        """Whether all arrived messages have been handled; for any thread, after `watch`."""
        return self._waits and not self._connection.has_work()

    @property
    def is_read_here(self) -> bool:
        """Whether this is the thread that reads the socket."""
        return threading.current_thread() is threading.main_thread()

    def wait(self, arrived: "SimpleQueue[Any]") -> Any:
        """The item that an answer puts into `arrived`; earlier executions stay queued."""
        while arrived.empty():
            if not self._read(poll=True):
                end_group()
        return arrived.get()

    def _read(self, *, poll: bool) -> bool:
        data = self._received(poll=poll)
        for text, body in self._frames.feed(data):
            header = parsed(text)
            if header[0] == ToWorker.INFERRED:
                take_inferred(self._connection, self._calls, header, body)
            else:
                self._messages.append((header, body))
        return bool(data)

    def _received(self, *, poll: bool) -> bytes:
        began_ns = time.perf_counter_ns()
        data = self._received_awake(began_ns + AWAKE_NS) if poll and self._came_soon else None
        if data is None:
            if self._is_watched:
                # Bytes stay in the socket until this thread runs: `drained` never misses them.
                self._waits = True
                self._connection.wait_work()
                self._waits = False
            data = self._connection.receive_work()
        if poll:
            self._came_soon = time.perf_counter_ns() - began_ns < 2 * AWAKE_NS
        return data

    def _received_awake(self, until_ns: int) -> bytes | None:
        while (data := self._connection.receive_work_now()) is None:
            if time.perf_counter_ns() >= until_ns:
                return None
            os.sched_yield()
        return data


def take_inferred(
    connection: GatewayConnection, calls: GatewayCalls, header: list[Any], body: memoryview
) -> None:
    """Pass another model's answer to the receiver of its call."""
    _, call, response, final = header
    calls.answer(call, Unpacking(connection, body).response(response), final)


class LifeStage(IntEnum):
    """Stages of a worker; they decide which calls model.py may make."""

    STARTING = 0
    COMPLETING = 1
    INITIALIZING = 2
    SERVING = 3
    FINALIZING = 4


@dataclass
class WorkerState:
    """The parts of this process that model.py's API uses."""

    connection: GatewayConnection
    calls: GatewayCalls
    work: WorkSocket
    stage: LifeStage = LifeStage.STARTING
    model_folder: str = ""


_workers: list[WorkerState] = []


def set_worker(worker: WorkerState) -> None:
    """Set the state of this process; once, at its start."""
    _workers[:] = [worker]


def worker() -> WorkerState:
    """The state of this process; TritonModelException if it is no worker."""
    if not _workers:
        raise TritonModelException("this works only in the process that serves the model")
    return _workers[0]


def get_model_dir() -> str:
    """The folder of the model's version."""
    return worker().model_folder
