"""Requests without a final response, and the senders that answer them."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

from .connection import GatewayConnection, Packing
from .errors import ErrorCode, TritonModelException
from .protocol import ToGateway
from .response import InferenceResponse

TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL = 1

EARLY_LIMIT = 10_000
"""Cancellations kept for requests that have not arrived."""


class OpenRequests:
    """Requests by number, for cancellations and holds; usable from any thread."""

    def __init__(self, connection: GatewayConnection, instance: str, decoupled: bool) -> None:
        self.connection = connection
        self.decoupled = decoupled
        self.dropped_text = (
            f"Python model '{instance}' dropped a request without its final response."
        )
        self._open: dict[int, weakref.ref[OpenRequest]] = {}
        self._early: set[int] = set()
        self._newest = 0
        self._held: set[int] = set()
        self._waiting: dict[int, list[Callable[[], object]]] = {}
        self._moved = threading.Condition()

    def add(self, number: int, wanted: Container[str]) -> "OpenRequest":
        """Add a request that has arrived."""
        request = OpenRequest(self, number, wanted)
        self._open[number] = weakref.ref(request)
        self._newest = max(number, self._newest)
        if self._early and number in self._early:
            self._early.discard(number)
            request.cancelled = True
        return request

    def forget(self, number: int) -> None:
        """Remove a request: it gets no more responses."""
        self._open.pop(number, None)
        if self._held:
            self.go_on([number])

    def cancel(self, numbers: Sequence[int]) -> None:
        """Cancel requests; a cancellation may arrive before its request."""
        for number in numbers:
            found = self._open.get(number)
            request = found() if found is not None else None
            if request is not None:
                request.cancelled = True
            elif number > self._newest and len(self._early) < EARLY_LIMIT:
                self._early.add(number)
        self.go_on(numbers)

    def hold(self, numbers: Sequence[int]) -> None:
        """Make sends for these requests block."""
        with self._moved:
            self._held.update(number for number in numbers if number in self._open)

    def go_on(self, numbers: Sequence[int]) -> None:
        """Let sends for these requests continue."""
        with self._moved:
            self._held.difference_update(numbers)
            self._moved.notify_all()
            waiting = [call for number in numbers for call in self._waiting.pop(number, ())]
        for call in waiting:
            call()

    def room(self, number: int) -> None:
        """Block while a request is held; returns at once in an event loop, which must not block."""
        if self.is_held(number) and not _in_event_loop():
            with self._moved:
                self._moved.wait_for(lambda: number not in self._held or number not in self._open)

    def is_held(self, number: int) -> bool:
        """Whether sends for it block."""
        return number in self._held

    def when_room(self, number: int, call: Callable[[], object]) -> None:
        """Call as soon as the request is not held: at once, or later from another thread."""
        with self._moved:
            if number in self._held:
                self._waiting.setdefault(number, []).append(call)
                return
        call()


class OpenRequest:
    """One request, kept alive by the objects that can still answer it.

    If it is collected unanswered, the gateway gets an error, so no client waits for ever.
    """

    __slots__ = (
        *("__weakref__", "_closed", "_lock", "_owner", "_sent"),
        *("cancelled", "number", "wanted"),
    )

    def __init__(self, owner: OpenRequests, number: int, wanted: Container[str]) -> None:
        self._owner, self.number, self.wanted = owner, number, wanted
        self.cancelled = False
        self._closed, self._sent = False, 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close it: it gets no more responses."""
        with self._lock:
            self._close()

    def claim(self) -> None:
        """Make the response that `execute` returned its only and final one.

        TritonModelException if a sender has been used before.
        """
        with self._lock:
            if self._closed or self._sent:
                self._check_open()
                self._check(FINAL, answered=True)
            self._closed = True
        self._owner.forget(self.number)

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """Send a response, a flag or both; TritonModelException if that breaks a rule."""
        self._owner.room(self.number)
        with self._lock:
            self._check(flags, answered=response is not None)
            packing = Packing(self._owner.connection)
            # If packing fails nothing is sent, and another response may follow.
            packed = None if response is None else packing.response(response, self.wanted)
            self._sent += 1
            if flags:
                self._close()
            header = [ToGateway.RESPONSE, self.number, packed, bool(flags)]
            self._owner.connection.send(header, packing.buffers)

    @property
    def held(self) -> bool:
        """Whether sends for it block."""
        return self._owner.is_held(self.number)

    async def room(self) -> None:
        """Wait in the event loop while the request is held."""
        if not self._owner.is_held(self.number):
            return
        moved, loop = asyncio.Event(), asyncio.get_running_loop()
        self._owner.when_room(self.number, partial(loop.call_soon_threadsafe, moved.set))
        await moved.wait()

    def _check(self, flags: int, *, answered: bool) -> None:
        if not self._owner.decoupled:
            if answered and self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one "
                    "response."
                )
            if not answered and flags and not self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final "
                    "before sending a response."
                )
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")

    def _close(self) -> None:
        self._closed = True
        self._owner.forget(self.number)

    def __del__(self) -> None:
        if self._closed:
            return
        self._owner.forget(self.number)
        error: list[Any] = [[], [ErrorCode.INTERNAL.name, self._owner.dropped_text], None]
        # A model that is not decoupled has sent its one response; only the flag is missing.
        answered = self._sent and not self._owner.decoupled
        header = [ToGateway.RESPONSE, self.number, None if answered else error, True]
        self._owner.connection.send_from_finalizer(header)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class InferenceResponseSender:
    """Sends responses to one request from any thread, also after `execute` has returned."""

    __slots__ = ("_request",)

    def __init__(self, request: OpenRequest) -> None:
        self._request = request

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, the final flag or both; TritonModelException if that breaks a rule."""
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"response must be an InferenceResponse, found {type(response)}")
        if flags not in (0, FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if flags == 0 and response is None:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        self._request.send(response, flags)

    async def room(self) -> None:
        """Wait while the request is held; in an event loop `send` does not block.

        Triton's senders have no such method.
        """
        await self._request.room()

    def is_held(self) -> bool:
        """Whether `room` would wait. Triton's senders have no such method."""
        return self._request.held

    def is_cancelled(self) -> bool:
        """Whether the request is cancelled."""
        return self._request.cancelled
