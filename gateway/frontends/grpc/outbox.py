"""The messages of one RPC on their way to its client, who may be slow, or take nothing at all."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

Send = Callable[[Sequence[bytes]], Awaitable[None]]


class Outbox:
    """Sends one batch of messages at a time, in the order in which they are put.

    A timer per RPC, and not one per batch, sees to it that the client takes something.
    """

    def __init__(self, send: Send, timeout_secs: float) -> None:
        self._send = send
        self._timeout_secs = timeout_secs
        self._time = asyncio.get_running_loop().time
        self._turn = asyncio.Lock()
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._patience: asyncio.Timeout | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something is being sent."""
        return self._turn.locked()

    async def put(self, messages: Sequence[bytes]) -> None:
        """Send messages after all that were put before; what sending them raises."""
        async with self._turn:
            self._began = self._time()
            if self._timer is None:
                self._look_again(self._timeout_secs)
            try:
                await self._send(messages)
            finally:
                self._began = 0.0

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Inside `async with`, TimeoutError ends the block when one batch takes too long."""
        try:
            async with asyncio.timeout(None) as self._patience:
                yield
        finally:
            self._patience = None
            if self._timer is not None:
                self._timer.cancel()

    def _look_again(self, after_secs: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_secs, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._began or self._patience is None:
            return
        left = self._began + self._timeout_secs - self._time()
        if left > 0:
            self._look_again(left)
        else:
            self._patience.reschedule(0)
            self._patience = None
