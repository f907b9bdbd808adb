"""Windows of calls on a channel: limits of the bytes that are under way."""

import asyncio

WINDOW_BYTES = 1 << 20
"""Maximum of unacknowledged bytes of a call; a single piece may be larger."""

REPORTED_BYTES = 64 << 10
"""Passed-on bytes from which a TAKEN frame is sent."""

FRAME_BYTES = 64
"""Overhead counted per frame, which limits the number of empty frames."""


class SendWindow:
    """The sender's side of a window: sent bytes that the receiver has not passed on."""

    __slots__ = ("_closed", "_unacknowledged", "_waiters")

    def __init__(self) -> None:
        self._unacknowledged = 0
        self._closed = False
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def has_room(self) -> bool:
        """Whether more may be sent."""
        return self._unacknowledged < WINDOW_BYTES or self._closed

    def sent(self, size: int) -> None:
        """Count a sent frame."""
        self._unacknowledged += size + FRAME_BYTES

    def taken(self, size: int) -> None:
        """Count bytes that the receiver has passed on, as `ReceiveWindow` reports them."""
        self._unacknowledged = max(0, self._unacknowledged - size)
        self._wake()

    def close(self) -> None:
        """Stop limiting, because the other end has closed; waiting tasks continue."""
        self._closed = True
        self._wake()

    async def room(self) -> None:
        """Wait until more may be sent."""
        while not self.has_room:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _wake(self) -> None:
        if not self.has_room:
            return
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class ReceiveWindow:
    """The receiver's side of a window: passed-on bytes that are not reported."""

    __slots__ = ("_unreported",)

    def __init__(self) -> None:
        self._unreported = 0

    def add(self, size: int) -> int:
        """Count a passed-on frame; the bytes to report now, or 0."""
        self._unreported += size + FRAME_BYTES
        if self._unreported < REPORTED_BYTES:
            return 0
        reported, self._unreported = self._unreported, 0
        return reported
