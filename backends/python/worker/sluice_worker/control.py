"""The socket for messages that must not wait for an execution."""

import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any

from .connection import GatewayConnection, end_group
from .errors import BadAnswer, described_failure
from .executions import Background
from .open_requests import OpenRequests
from .packing import parsed
from .protocol import FrameSplitter, ToGateway, ToWorker
from .work import GatewayCalls, take_inferred


class ReadinessChecks:
    """Calls `is_ready` in a thread of its own, one call after the other."""

    def __init__(self, connection: GatewayConnection) -> None:
        self._connection = connection
        self._calls: SimpleQueue[int] = SimpleQueue()

    def serve(self, model: Any, background: Background) -> None:
        """Start to answer calls."""
        answering = threading.Thread(
            target=self._answer, args=(model.is_ready, background), daemon=True
        )
        answering.start()

    def ask(self, call: int) -> None:
        """Queue a call."""
        self._calls.put(call)

    def _answer(self, is_ready: Any, background: Background) -> None:
        while True:
            answer: list[Any] = [ToGateway.READY, self._calls.get()]
            try:
                self._connection.send_control([*answer, _asked(is_ready, background), None])
            except BaseException as failure:  # noqa: BLE001 - around one call of foreign code
                self._connection.send_control([*answer, None, described_failure(failure)[0]])


def _asked(is_ready: Any, background: Background) -> bool:
    found = is_ready()
    if isinstance(found, Coroutine):
        found = background.result(found)
    if not isinstance(found, bool):
        raise BadAnswer("is_ready() must return a boolean value")
    return found


class ControlSocket:
    """Reads messages of the gateway; ends the process when the gateway closes the socket."""

    def __init__(
        self, connection: GatewayConnection, calls: GatewayCalls, readiness: ReadinessChecks
    ) -> None:
        self.requests: OpenRequests | None = None
        self._connection, self._calls, self._readiness = connection, calls, readiness
        self._handlers: dict[int, Callable[[list[Any], memoryview], None]] = {
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
        """Start the thread that reads."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        # Without the gateway the process ends, also during a call of model.py.
        try:
            reader = FrameSplitter()
            while data := self._connection.receive_control():
                for text, body in reader.feed(data):
                    header = parsed(text)
                    self._handlers[header[0]](header, body)
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
        self._connection.send_released()

    def _is_ready(self, header: list[Any], _: memoryview) -> None:
        self._readiness.ask(header[1])

    def _inferred(self, header: list[Any], body: memoryview) -> None:
        take_inferred(self._connection, self._calls, header, body)

    def _done(self, header: list[Any], _: memoryview) -> None:
        _, call, error, value = header
        self._calls.answer(call, (error, value), final=True)
