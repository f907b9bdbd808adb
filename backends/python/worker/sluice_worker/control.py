"""What the gateway says beside executions, heard by a thread of its own."""

import threading
from collections.abc import Callable
from typing import Any

from .calls import Calls
from .connection import Connection, end_group
from .frames import FrameReader
from .messages import ToGateway, ToWorker
from .open_requests import OpenRequests
from .packing import parsed
from .readiness import Readiness
from .work import take_inferred


class Control:
    """Hears the gateway until it goes, and then ends the process."""

    def __init__(self, connection: Connection, calls: Calls, readiness: Readiness) -> None:
        self.requests: OpenRequests | None = None
        self._connection, self._calls, self._readiness = connection, calls, readiness
        self._heard: dict[int, Callable[[list[Any], memoryview], None]] = {
            ToWorker.CANCEL: self._cancel,
            ToWorker.RELEASED: self._released,
            ToWorker.PING: self._ping,
            ToWorker.IS_READY: self._is_ready,
            ToWorker.INFERRED: self._inferred,
            ToWorker.DONE: self._done,
            ToWorker.HOLD: self._hold,
            ToWorker.GO_ON: self._go_on,
        }

    def start(self) -> None:
        """Hear from now on."""
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        # Without the gateway nobody is left to serve, whatever model.py is doing.
        try:
            reader = FrameReader()
            while data := self._connection.receive_control():
                for text, body in reader.feed(data):
                    header = parsed(text)
                    self._heard[header[0]](header, body)
        finally:
            end_group()

    def _cancel(self, header: list[Any], _: memoryview) -> None:
        if self.requests is not None:
            self.requests.cancel(header[1:])

    def _hold(self, header: list[Any], _: memoryview) -> None:
        if self.requests is not None:
            self.requests.hold(header[1:])

    def _go_on(self, header: list[Any], _: memoryview) -> None:
        if self.requests is not None:
            self.requests.go_on(header[1:])

    def _released(self, header: list[Any], _: memoryview) -> None:
        _, freed, dropped = header
        self._connection.outgoing.freed(freed)
        self._connection.incoming.drop(dropped)

    def _ping(self, header: list[Any], _: memoryview) -> None:
        self._connection.send_control([ToGateway.PONG, header[1]])
        self._connection.tell_released()

    def _is_ready(self, header: list[Any], _: memoryview) -> None:
        self._readiness.ask(header[1])

    def _inferred(self, header: list[Any], body: memoryview) -> None:
        take_inferred(self._connection, self._calls, header, body)

    def _done(self, header: list[Any], _: memoryview) -> None:
        _, call, error, value = header
        self._calls.answer(call, (error, value), final=True)
