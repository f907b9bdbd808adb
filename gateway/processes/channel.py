"""Frames and channel between the server and a process that it has started.

A frame is a head of nine bytes (payload length, kind, number of the call; little endian) and a
payload, whose format depends on the kind.
"""

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
    """Kinds of frames of every channel; subclasses add the kinds of one channel.

    A "headed" payload is the length of JSON, the JSON, and further bytes.
    """

    DATA = 0  # a piece of the body or the messages of a call
    END = 1  # no more DATA
    GONE = 2  # the sender reads no further DATA
    TAKEN = 3  # number of bytes of DATA that were passed on
    PING = 4  # from the server to the process
    PONG = 5  # the answer to PING
    ABORT = 6  # the sender has failed the call; neither END nor GONE follows


OWN_KINDS = 16
"""The lowest kind of the subclasses."""

NO_CALL = 0
"""Call number of frames that belong to the processes, not to a call."""


def call_numbers() -> Iterator[int]:
    """Call numbers, without NO_CALL; they repeat after 2**32 calls."""
    while True:
        yield from range(1, 1 << 32)


class Frame(NamedTuple):
    """One frame."""

    kind: int
    call: int
    payload: bytes


def packed(kind: int, call: int, payload: bytes = b"") -> bytes:
    """The bytes of a frame."""
    return HEAD.pack(len(payload), kind, call) + payload


def headed(head: object, rest: bytes = b"") -> bytes:
    """A headed payload."""
    text = orjson.dumps(head)
    return b"%b%b%b" % (LENGTH.pack(len(text)), text, rest)


def read_headed(payload: bytes) -> tuple[Any, bytes]:
    """The JSON and the further bytes of a headed payload."""
    end = LENGTH.size + LENGTH.unpack_from(payload)[0]
    return orjson.loads(payload[LENGTH.size : end]), payload[end:]


def number(value: int) -> bytes:
    """The payload of a number below 2**32."""
    return LENGTH.pack(value)


def read_number(payload: bytes) -> int:
    """The number in a payload."""
    found: int = LENGTH.unpack(payload)[0]
    return found


class FrameDecoder:
    """Decoder of received bytes into frames."""

    def __init__(self) -> None:
        self._incomplete = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames completed by `data`; iterate over all of them."""
        if self._incomplete:
            self._incomplete += data
            data = bytes(self._incomplete) if self._is_complete() else b""
            if not data:
                return
            self._incomplete.clear()
        start, size = 0, len(data)
        while size - start >= HEAD.size:
            length, kind, call = HEAD.unpack_from(data, start)
            end = start + HEAD.size + length
            if end > size:
                break
            yield Frame(kind, call, data[start + HEAD.size : end])
            start = end
        if start < size:
            self._incomplete += memoryview(data)[start:]

    def _is_complete(self) -> bool:
        """Whether the first frame is complete."""
        if len(self._incomplete) < HEAD.size:
            return False
        length: int = HEAD.unpack_from(self._incomplete)[0]
        return len(self._incomplete) >= HEAD.size + length


class Receiver(ABC):
    """Receiver of the frames of one call."""

    @abstractmethod
    def hear(self, frame: Frame) -> None:
        """Handle a frame of the call."""

    @abstractmethod
    def lose(self) -> None:
        """Handle a disconnect of the other process."""


class Channel(asyncio.Protocol):
    """Sends frames, with one write per turn of the event loop, and dispatches received ones.

    `on_frame` gets the frames of the processes, and of calls without a receiver, such as ended
    calls. Buffers are bounded by the windows of the calls. If handling a frame fails, ABORT ends
    its call on both sides.
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
        """Whether the other process has disconnected."""
        return self._lost.is_set()

    async def lost(self) -> None:
        """Wait until the other process has disconnected."""
        await self._lost.wait()

    def join(self, call: int, receiver: Receiver) -> None:
        """Register the receiver of a call; `lose` is called immediately after a disconnect."""
        self._receivers[call] = receiver
        if self.is_lost:
            receiver.lose()

    def leave(self, call: int) -> None:
        """Remove the receiver of a call."""
        self._receivers.pop(call, None)

    def send(self, kind: int, call: int = NO_CALL, payload: bytes = b"") -> None:
        """Send a frame; dropped after a disconnect."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(packed(kind, call, payload))

    def close(self) -> None:
        """Send the unsent frames and close the connection."""
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
                # Around one call: the others on the channel continue.
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
        """End the call of a frame on both sides; the other side does not answer ABORT."""
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
