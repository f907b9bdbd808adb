"""Whether model.py says that it is ready, asked beside executions."""

import threading
from collections.abc import Coroutine
from queue import SimpleQueue
from typing import Any

from .background import Background
from .connection import Connection
from .errors import BadAnswer, told
from .messages import ToGateway


class Readiness:
    """Calls `is_ready` in a thread of its own, one call after the other."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._calls: SimpleQueue[int] = SimpleQueue()

    def serve(self, model: Any, background: Background) -> None:
        """Answer what is asked from now on."""
        answering = threading.Thread(
            target=self._answer, args=(model.is_ready, background), daemon=True
        )
        answering.start()

    def ask(self, call: int) -> None:
        """Have a call answered."""
        self._calls.put(call)

    def _answer(self, is_ready: Any, background: Background) -> None:
        while True:
            answer: list[Any] = [ToGateway.READY, self._calls.get()]
            try:
                self._connection.send_control([*answer, _asked(is_ready, background), None])
            except BaseException as failure:  # noqa: BLE001 - around one call of anybody's code
                self._connection.send_control([*answer, None, told(failure)[0]])


def _asked(is_ready: Any, background: Background) -> bool:
    found = is_ready()
    if isinstance(found, Coroutine):
        found = background.result(found)
    if not isinstance(found, bool):
        raise BadAnswer("is_ready() must return a boolean value")
    return found
