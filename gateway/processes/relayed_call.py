"""Calls in a frontend process that the server answers."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from gateway.errors import first_error
from gateway.processes.channel import Channel, ChannelCall, Frame, call_numbers, headed
from gateway.processes.messages import FrontendKind


class ServerDisconnected(Exception):
    """The server has disconnected from its frontend process."""


class RelayCancelled(Exception):
    """The client has disconnected before the end of the answer."""


class RelayedCall(ChannelCall):
    """One call, inside `with`; exiting before the end of the answer cancels it at the server.

    One task reads the frames of the answer, another may send.
    """

    def __init__(self, channel: Channel, call: int) -> None:
        super().__init__(channel, call)
        self._frames: deque[Frame] = deque()
        self._is_over = False
        self._is_lost = False
        self._is_cancelled = False
        self._wanted = asyncio.Event()
        self._on_failure: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        self._channel.join(self._call, self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
        self._channel.leave(self._call)

    def cancel(self) -> None:
        """Cancel the call, because the client has disconnected; idempotent."""
        if not self._is_over:
            self._is_cancelled = self._is_over = True
            self._channel.send(FrontendKind.GONE, self._call)
            self._window.close()
            self._wake()

    def _take(self, frame: Frame) -> None:
        if frame.kind == FrontendKind.WANTED:
            self._wanted.set()
            return
        if frame.kind in (FrontendKind.END, FrontendKind.WHOLE, FrontendKind.ABORT):
            self._is_over = True
            self._window.close()
            if frame.payload and self._on_failure is not None:
                self._on_failure()
        self._frames.append(frame)
        self._wake()

    def lose(self) -> None:
        self._is_lost = self._is_over = True
        self._window.close()
        self._wake()

    def begin(self, kind: int, head: object, first: bytes = b"") -> None:
        """Send the head of the request and the first piece of its body."""
        self._channel.send(kind, self._call, headed(head, first))
        self._window.sent(len(first))

    async def send(self, piece: bytes) -> None:
        """Send a piece of the request; return when the window has room."""
        if not self._is_over:
            self._send_data(piece)
            await self._window.room()

    def end(self) -> None:
        """End the request."""
        if not self._is_over:
            self._channel.send(FrontendKind.END, self._call)

    async def frames(self) -> list[Frame]:
        """All received frames, at least one.

        Raises ServerDisconnected or RelayCancelled if no further frame will arrive.
        """
        while not self._frames:
            if self._is_cancelled:
                raise RelayCancelled
            if self._is_lost:
                raise ServerDisconnected
            await self._news()
        found = list(self._frames)
        self._frames.clear()
        return found

    async def body_wanted(self) -> None:
        """Wait until the server reads the body of the request."""
        await self._wanted.wait()

    def on_failure(self, failed: Callable[[], None]) -> None:
        """Call a function when the server has failed the call."""
        self._on_failure = failed

    def passed_on(self, size: int) -> None:
        """Count a frame of the answer that was passed to the client."""
        if not self._is_over:
            self._passed_on(size)


@asynccontextmanager
async def concurrently(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run a coroutine concurrently with the `async with` block, and cancel it at the end.

    The first error of either is raised.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work)
            yield
            task.cancel()
    except BaseExceptionGroup as group:
        raise first_error(group) from None


class RelayedCalls:
    """Factory of the calls of one frontend process."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._numbers = call_numbers()

    def new(self) -> RelayedCall:
        """A call with the next number."""
        return RelayedCall(self.channel, next(self._numbers))
