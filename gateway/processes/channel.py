"""One end of the connection between the server and a process that it has started."""

import asyncio
import logging
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import orjson

log = logging.getLogger("sluice.server")

HEAD = struct.Struct("<IBI")
LENGTH = struct.Struct("<I")


class FrameKind:
    """What a frame says, in every channel; what else there is, each channel's own kinds say.

    "Headed" payloads are JSON, its length before it, and bytes behind it.
    """

    DATA = 0  # a piece of what a call carries
    END = 1  # no more DATA
    GONE = 2  # nothing more is wanted
    TAKEN = 3  # so many bytes of DATA have been passed on: a number
    PING = 4  # to a process that the server has started
    PONG = 5  # what it answers
    ABORT = 6  # the sender has ended the call in its middle; neither END nor GONE follows


OWN_KINDS = 16
"""From here on kinds are each channel's own."""

NO_CALL = 0
"""The number of no call: what the processes say to each other."""


def call_numbers() -> Iterator[int]:
    """Every number but the one that is no call's; when they come again the first have ended."""
    while True:
        yield from range(1, 1 << 32)


class Frame(NamedTuple):
    """One message."""

    kind: int
    call: int
    payload: bytes


def packed(kind: int, call: int, payload: bytes = b"") -> bytes:
    """A frame as bytes."""
    return HEAD.pack(len(payload), kind, call) + payload


def headed(head: object, rest: bytes = b"") -> bytes:
    """The payload of JSON and bytes behind it."""
    text = orjson.dumps(head)
    return b"%b%b%b" % (LENGTH.pack(len(text)), text, rest)


def read_headed(payload: bytes) -> tuple[Any, bytes]:
    """The JSON and the bytes of such a payload."""
    end = LENGTH.size + LENGTH.unpack_from(payload)[0]
    return orjson.loads(payload[LENGTH.size : end]), payload[end:]


def number(value: int) -> bytes:
    """The payload of a number."""
    return LENGTH.pack(value)


def read_number(payload: bytes) -> int:
    """The number in such a payload."""
    found: int = LENGTH.unpack(payload)[0]
    return found


class FrameDecoder:
    """Takes bytes as they come, and gives the frames that are whole."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that end in `data`; all of them must be taken."""
        if self._held:
            self._held += data
            data = bytes(self._held) if self._is_whole() else b""
            if not data:
                return
            self._held.clear()
        start, size = 0, len(data)
        while size - start >= HEAD.size:
            length, kind, call = HEAD.unpack_from(data, start)
            end = start + HEAD.size + length
            if end > size:
                break
            yield Frame(kind, call, data[start + HEAD.size : end])
            start = end
        if start < size:
            self._held += memoryview(data)[start:]

    def _is_whole(self) -> bool:
        """Whether the first frame of what is held has all come."""
        if len(self._held) < HEAD.size:
            return False
        length: int = HEAD.unpack_from(self._held)[0]
        return len(self._held) >= HEAD.size + length


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
        self._reader = FrameDecoder()
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
        if broken.call == NO_CALL or broken.kind == FrameKind.ABORT:
            return
        receiver = self._receivers.pop(broken.call, None)
        self.send(FrameKind.ABORT, broken.call)
        if receiver is not None:
            try:
                receiver.hear(Frame(FrameKind.ABORT, broken.call, b""))
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
