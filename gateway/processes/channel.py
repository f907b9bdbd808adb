"""One end of the connection between the server and a process that it has started."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from gateway.processes.frames import NO_CALL, Frame, FrameReader, Kind, packed

log = logging.getLogger("sluice.server")


class Receiver(ABC):
    """What one call hears from the other process."""

    @abstractmethod
    def hear(self, frame: Frame) -> None:
        """A frame of this call."""

    @abstractmethod
    def lose(self) -> None:
        """The other process is gone."""


class Channel(asyncio.Protocol):
    """Sends frames, those of one turn of the loop in one write, and hands out what comes.

    Frames of calls that nobody here knows go to `on_frame`, and so do those of the processes.
    Frames of calls that have ended here are such, too. What is under way is bounded by each call's
    window, so nothing here is. A frame that cannot be handled ends its call on both sides by ABORT.
    """

    def __init__(self, on_frame: Callable[[Frame], None]) -> None:
        self._on_frame = on_frame
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._receivers: dict[int, Receiver] = {}
        self._unsent: list[bytes] = []
        self._transport: Any = None
        self._lost = asyncio.Event()

    @property
    def is_lost(self) -> bool:
        """Whether the other process is gone."""
        return self._lost.is_set()

    async def lost(self) -> None:
        """Wait until the other process is gone."""
        await self._lost.wait()

    def join(self, call: int, receiver: Receiver) -> None:
        """Have the frames of a call; at once told if there will be none."""
        self._receivers[call] = receiver
        if self.is_lost:
            receiver.lose()

    def leave(self, call: int) -> None:
        """Have no more of them."""
        self._receivers.pop(call, None)

    def send(self, kind: int, call: int = NO_CALL, payload: bytes = b"") -> None:
        """Send a frame; one to a process that is gone is dropped."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(packed(kind, call, payload))

    def close(self) -> None:
        """Send what is unsent, and end the connection."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            try:
                self._hear(frame)
            except Exception:
                # Around one call: the others on the channel go on.
                log.exception("frame not handled", extra={"kind": frame.kind, "call": frame.call})
                self._abort(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()
        for receiver in tuple(self._receivers.values()):
            try:
                receiver.lose()
            except Exception:
                log.exception("call not ended")

    def _abort(self, broken: Frame) -> None:
        """End the call of a frame here and there. The other side does not answer an ABORT."""
        if broken.call == NO_CALL or broken.kind == Kind.ABORT:
            return
        receiver = self._receivers.pop(broken.call, None)
        self.send(Kind.ABORT, broken.call)
        if receiver is not None:
            try:
                receiver.hear(Frame(Kind.ABORT, broken.call, b""))
            except Exception:
                log.exception("call not ended", extra={"call": broken.call})

    def _hear(self, frame: Frame) -> None:
        receiver = self._receivers.get(frame.call)
        if receiver is None:
            self._on_frame(frame)
        else:
            receiver.hear(frame)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(unsent))
