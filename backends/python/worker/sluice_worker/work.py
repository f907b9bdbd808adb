"""The socket for executions, and calls that wait for an answer of the gateway."""

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from .connection import Buffer, Connection, end_group
from .errors import TritonModelException
from .packing import Unpacking, parsed
from .protocol import FrameReader, ToGateway, ToWorker

Answered = Callable[[Any, bool], None]
"""Is told each answer, and whether it is the last."""


class Calls:
    """Numbers calls, and brings their answers; usable from any thread."""

    instance = ""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Answered] = {}

    def begin(self, answered: Answered) -> int:
        """A number for a call whose answers go to `answered`, in the control thread."""
        number = next(self._numbers)
        self._waiting[number] = answered
        return number

    def ask(self, kind: ToGateway, *values: Any, buffers: Sequence[Buffer] = ()) -> Any:
        """Send a call and wait for its value; TritonModelException with the gateway's text."""
        answers: SimpleQueue[tuple[str | None, Any]] = SimpleQueue()
        number = self.begin(lambda answer, _: answers.put(answer))
        self._connection.send([kind, number, *values], buffers)
        error, value = answers.get()
        if error is not None:
            raise TritonModelException(self.refused(error))
        return value

    def refused(self, reason: str) -> str:
        """How Triton tells a model why the server has not done what it asked."""
        return f"Failed to process the request for model '{self.instance}', message: {reason}"

    def answer(self, number: int, answer: Any, final: bool) -> None:
        """Bring an answer to whoever waits for it."""
        answered = self._waiting.pop(number, None) if final else self._waiting.get(number)
        if answered is not None:
            answered(answer, final)


Message = tuple[list[Any], memoryview]
"""The header, and the body."""
AWAKE_NS = 300_000
"""A process that sleeps takes long to wake up. Where the latest message came soon, one that waits
for the next stays awake for so long, and lets everybody else have the processor meanwhile."""


class Work:
    """Executions and the like, one after the other, and answers that somebody waits for."""

    def __init__(self, connection: Connection, calls: Calls) -> None:
        self._connection, self._calls = connection, calls
        self._frames = FrameReader()
        self._messages: deque[Message] = deque()
        self._came_soon = False

    def next(self) -> Message | None:
        """What is to be done next; None once the gateway has gone."""
        while not self._messages:
            if not self._read():
                return None
        return self._messages.popleft()

    @property
    def is_read_here(self) -> bool:
        """Whether the thread that asks is the one that reads."""
        return threading.current_thread() is threading.main_thread()

    def wait(self, arrived: "SimpleQueue[Any]") -> Any:
        """What an answer puts there; executions that come before it are kept for later."""
        while arrived.empty():
            if not self._read():
                end_group()
        return arrived.get()

    def _read(self) -> bool:
        data = self._received()
        for text, body in self._frames.feed(data):
            header = parsed(text)
            if header[0] == ToWorker.INFERRED:
                take_inferred(self._connection, self._calls, header, body)
            else:
                self._messages.append((header, body))
        return bool(data)

    def _received(self) -> bytes:
        began_ns = time.perf_counter_ns()
        data = self._received_awake(began_ns + AWAKE_NS) if self._came_soon else None
        if data is None:
            data = self._connection.receive_work()
        self._came_soon = time.perf_counter_ns() - began_ns < 2 * AWAKE_NS
        return data

    def _received_awake(self, until_ns: int) -> bytes | None:
        while (data := self._connection.receive_work_now()) is None:
            if time.perf_counter_ns() >= until_ns:
                return None
            os.sched_yield()
        return data


def take_inferred(
    connection: Connection, calls: Calls, header: list[Any], body: memoryview
) -> None:
    """Bring another model's answer to whoever waits for it."""
    _, call, response, final = header
    calls.answer(call, Unpacking(connection, body).response(response), final)
