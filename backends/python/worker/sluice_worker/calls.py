"""Calls of this worker's that wait for an answer of the gateway's."""

import itertools
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from .connection import Buffer, Connection
from .errors import TritonModelException
from .messages import ToGateway

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
