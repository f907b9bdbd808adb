"""A call in a frontend process: what it sends to the server, and what comes back."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from gateway.errors import first_error
from gateway.processes.call import ChannelCall
from gateway.processes.channel import Channel, Frame, call_numbers, headed
from gateway.processes.messages import FrontendKind


class ServerDisconnected(Exception):
    """There is no server behind this frontend any more."""


class RelayCancelled(Exception):
    """The client wants no more of the answer."""


class RelayedCall(ChannelCall):
    """Inside `with`, one call; leaving it before its answer has ended tells the server so.

    One task reads the answer's frames, another may send.
    """

    def __init__(self, channel: Channel, call: int) -> None:
        super().__init__(channel, call)
        self._frames: deque[Frame] = deque()
        self._is_over = False
        self._is_lost = False
        self._has_left = False
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
        self.leave()
        self._channel.leave(self._call)

    def leave(self) -> None:
        """The client has gone: nothing more is wanted; idempotent."""
        if not self._is_over:
            self._has_left = self._is_over = True
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
        """Ask, by a head and the first piece of what belongs to it."""
        self._channel.send(kind, self._call, headed(head, first))
        self._window.sent(len(first))

    async def send(self, piece: bytes) -> None:
        """Send what belongs to the request; returns when there is room for more."""
        if not self._is_over:
            self._send_data(piece)
            await self._window.room()

    def end(self) -> None:
        """The request is whole."""
        if not self._is_over:
            self._channel.send(FrontendKind.END, self._call)

    async def frames(self) -> list[Frame]:
        """All received frames, at least one.

        Raises ServerDisconnected or RelayCancelled if no further frame will arrive.
        """
        while not self._frames:
            if self._has_left:
                raise RelayCancelled
            if self._is_lost:
                raise ServerDisconnected
            await self._news()
        found = list(self._frames)
        self._frames.clear()
        return found

    async def wanted(self) -> None:
        """Wait until the server wants more of the request than it has got with the head."""
        await self._wanted.wait()

    def on_failure(self, failed: Callable[[], None]) -> None:
        """Have a function called as soon as it is known that the call has failed."""
        self._on_failure = failed

    def passed_on(self, size: int) -> None:
        """A frame of so many bytes of the answer has been given to the client."""
        if not self._is_over:
            self._passed_on(size)


@asynccontextmanager
async def beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Inside `async with` some work goes on; it is cancelled in the end.

    What goes wrong first, inside or there, is raised.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work)
            yield
            task.cancel()
    except BaseExceptionGroup as group:
        raise first_error(group) from None


class RelayedCalls:
    """The calls of one frontend process, by number."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._numbers = call_numbers()

    def new(self) -> RelayedCall:
        """One more call."""
        return RelayedCall(self.channel, next(self._numbers))
