"""How much may be under way in one direction of a call."""

import asyncio
from abc import abstractmethod

from gateway.processes.channel import Channel, Frame, FrameKind, Receiver, number, read_number

WINDOW_BYTES = 1 << 20
"""So much of a call may be on its way and not passed on; a single piece may be larger."""

REPORTED_BYTES = 64 << 10
"""What has been passed on is told when it is so much."""


FRAME_BYTES = 64
"""What a frame takes besides its payload, so that empty ones are not endless."""


class SendWindow:
    """The sender's side: what has been sent, and not been passed on yet."""

    __slots__ = ("_closed", "_under_way", "_waiters")

    def __init__(self) -> None:
        self._under_way = 0
        self._closed = False
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def has_room(self) -> bool:
        """Whether more may be sent."""
        return self._under_way < WINDOW_BYTES or self._closed

    def sent(self, size: int) -> None:
        """A frame of so many bytes is under way."""
        self._under_way += size + FRAME_BYTES

    def taken(self, size: int) -> None:
        """So much has been passed on, as `ReceiveWindow` count it."""
        self._under_way -= size
        self._wake()

    def close(self) -> None:
        """Nobody takes anything any more: who waits need not."""
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
    """The receiver's side: what has been passed on, and not been told yet."""

    __slots__ = ("_untold",)

    def __init__(self) -> None:
        self._untold = 0

    def add(self, size: int) -> int:
        """A frame of so many bytes has been passed on; how much is to be told now, if anything."""
        self._untold += size + FRAME_BYTES
        if self._untold < REPORTED_BYTES:
            return 0
        told, self._untold = self._untold, 0
        return told


class ChannelCall(Receiver):
    """The windows of one call, and a task that waits for what is heard."""

    def __init__(self, channel: Channel, call: int) -> None:
        self._channel = channel
        self._call = call
        self._window = SendWindow()
        self._receipts = ReceiveWindow()
        self._waiter: asyncio.Future[None] | None = None

    def hear(self, frame: Frame) -> None:
        if frame.kind == FrameKind.TAKEN:
            self._window.taken(read_number(frame.payload))
        else:
            self._take(frame)

    @abstractmethod
    def _take(self, frame: Frame) -> None:
        """A frame that is not about the window."""

    def _send_data(self, payload: bytes) -> None:
        self._channel.send(FrameKind.DATA, self._call, payload)
        self._window.sent(len(payload))

    def _passed_on(self, size: int) -> None:
        """A frame of so many bytes has been passed on."""
        if told := self._receipts.add(size):
            self._channel.send(FrameKind.TAKEN, self._call, number(told))

    async def _news(self) -> None:
        """Wait until something may have been heard; one task."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
