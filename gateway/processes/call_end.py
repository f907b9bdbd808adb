"""What either end of a call between two processes has."""

import asyncio
from abc import abstractmethod

from gateway.processes.call import Receipts, Window
from gateway.processes.channel import Channel, Receiver
from gateway.processes.frames import Frame, Kind, number, read_number


class CallEnd(Receiver):
    """The windows of one call, and a task that waits for what is heard."""

    def __init__(self, channel: Channel, call: int) -> None:
        self._channel = channel
        self._call = call
        self._window = Window()
        self._receipts = Receipts()
        self._waiter: asyncio.Future[None] | None = None

    def hear(self, frame: Frame) -> None:
        if frame.kind == Kind.TAKEN:
            self._window.taken(read_number(frame.payload))
        else:
            self._take(frame)

    @abstractmethod
    def _take(self, frame: Frame) -> None:
        """A frame that is not about the window."""

    def _send_data(self, payload: bytes) -> None:
        self._channel.send(Kind.DATA, self._call, payload)
        self._window.sent(len(payload))

    def _passed_on(self, size: int) -> None:
        """A frame of so many bytes has been passed on."""
        if told := self._receipts.add(size):
            self._channel.send(Kind.TAKEN, self._call, number(told))

    async def _news(self) -> None:
        """Wait until something may have been heard; one task."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
