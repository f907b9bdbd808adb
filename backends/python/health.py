"""Health checks of a worker, and readiness of its model."""

import asyncio
from collections.abc import Callable

from backends.python.codec import to_json
from backends.python.connection import FrameSocket
from backends.python.worker.sluice_worker.protocol import ToWorker
from gateway.errors import Code, InferenceError

MISSED = 3
READY_SECS = 5.0


class Pulse:
    """Pings a worker every `interval_secs` (0: never), until `stop`.

    `on_silence` is called after three unanswered pings in a row. `started` is done at the first
    answer.
    """

    def __init__(self, control: FrameSocket, on_silence: Callable[[], None]) -> None:
        self._control = control
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = self._loop.create_future()
        self._interval_secs = 0.0
        self._asked = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ask()

    def every(self, interval_secs: float) -> None:
        """Start the pings."""
        self._interval_secs = interval_secs
        if interval_secs:
            self._timer = self._loop.call_later(interval_secs, self._beat)

    def answered(self) -> None:
        """PONG."""
        self._asked = 0
        if not self.started.done():
            self.started.set_result(None)

    def stop(self) -> None:
        """Stop the pings."""
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        if self._asked >= MISSED:
            self._on_silence()
            return
        self._ask()
        self._timer = self._loop.call_later(self._interval_secs, self._beat)

    def _ask(self) -> None:
        self._asked += 1
        self._control.send(to_json([ToWorker.PING, self._asked]))


class Readiness:
    """Calls a model's own `is_ready` (python backend, is_ready); concurrent checks share a call."""

    def __init__(self, control: FrameSocket, instance: str) -> None:
        self._control = control
        self._instance = instance
        self._calls = 0
        self._asking: asyncio.Future[tuple[bool | None, str | None]] | None = None

    async def check(self) -> None:
        """Raise InferenceError unless the model is ready."""
        shared = self._asking is not None
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_future()
            self._calls += 1
            self._control.send(to_json([ToWorker.IS_READY, self._calls]))
        try:
            async with asyncio.timeout(READY_SECS):
                ready, error = await asyncio.shield(self._asking)
        except TimeoutError:
            which = "in-flight is_ready()" if shared else "user-defined is_ready()"
            raise InferenceError(
                Code.UNAVAILABLE, f"Timed out waiting for {which} response"
            ) from None
        if error is not None:
            raise InferenceError(Code.INTERNAL, error)
        if not ready:
            raise InferenceError(
                Code.UNAVAILABLE,
                f"Model '{self._instance}' is not ready (user-defined check failed).",
            )

    def answered(self, call: int, ready: bool | None, error: str | None) -> None:
        """READY."""
        if self._asking is not None and call == self._calls:
            self._asking.set_result((ready, error))
            self._asking = None

    def end(self, why: str) -> None:
        """End the pending check: the worker has ended."""
        if self._asking is not None:
            self._asking.set_result((None, why))
            self._asking = None
