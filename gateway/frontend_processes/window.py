"""How much may be under way in one direction of a call."""

import asyncio

WINDOW_BYTES = 1 << 20
"""So much of a call may be on its way and not passed on; a single piece may be larger."""

REPORTED_BYTES = 64 << 10
"""What has been passed on is told when it is so much."""


class Window:
    """The sender's side: what has been sent, and not been passed on yet."""

    __slots__ = ("_closed", "_under_way", "_waiter")

    def __init__(self) -> None:
        self._under_way = 0
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_room(self) -> bool:
        """Whether more may be sent."""
        return self._under_way < WINDOW_BYTES or self._closed

    def sent(self, size: int) -> None:
        """So much more is under way."""
        self._under_way += size

    def taken(self, size: int) -> None:
        """So much has been passed on."""
        self._under_way -= size
        self._wake()

    def close(self) -> None:
        """Nobody takes anything any more: who waits need not."""
        self._closed = True
        self._wake()

    async def room(self) -> None:
        """Wait until more may be sent; one task at a time."""
        while not self.has_room:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self.has_room:
            self._waiter.set_result(None)


class Receipts:
    """The receiver's side: what has been passed on, and not been told yet."""

    __slots__ = ("_untold",)

    def __init__(self) -> None:
        self._untold = 0

    def add(self, size: int) -> int:
        """So much has been passed on; how much is to be told now, which may be nothing."""
        self._untold += size
        if self._untold < REPORTED_BYTES:
            return 0
        told, self._untold = self._untold, 0
        return told
