"""Calls on a channel between the server and a process that it has started.

A frame is a head of nine bytes (payload length, kind, number of the call; little endian) and a
payload, whose format depends on the kind.
"""

import asyncio
import logging
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import orjson

from gateway.event_loop import WRITES
from gateway.processes.windows import ReceiveWindow, SendWindow

log = logging.getLogger("sluice.server")

new_tuple = tuple.__new__
HEAD = struct.Struct("<IBI")
LENGTH = struct.Struct("<I")

MOST_BYTES = (1 << 32) - 1
"""Longest payload that a head can announce."""


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

NO_CALL, LASTING_CALL = 0, (1 << 32) - 1
"""Numbers of no call: of frames of the processes, and of those of a lasting exchange of both."""


def call_numbers() -> Iterator[int]:
    """Call numbers, without NO_CALL and LASTING_CALL; they repeat after 2**32 calls."""
    while True:
        yield from range(1, LASTING_CALL)


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


class FrameTooLong(Exception):
    """A head announces a payload above the limit of its decoder."""


class FrameDecoder:
    """Decoder of received bytes into frames; `most_bytes` is the limit of a payload."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._incomplete = bytearray()

    def is_one(self, data: bytes) -> bool:
        """Whether `data` is one whole frame, with nothing received before it."""
        size = len(data) - HEAD.size
        return size >= 0 and not self._incomplete and LENGTH.unpack_from(data)[0] == size

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames completed by `data`; iterate over all of them. Raises FrameTooLong."""
        if self._incomplete:
            self._incomplete += data
            data = bytes(self._incomplete) if self._is_complete() else b""
            if not data:
                return
            self._incomplete.clear()
        start, size = 0, len(data)
        while size - start >= HEAD.size:
            length, kind, call = HEAD.unpack_from(data, start)
            if length > self.most_bytes:
                raise FrameTooLong(f"a frame of {length} bytes, the limit is {self.most_bytes}")
            end = start + HEAD.size + length
            if end > size:
                break
            # As `Frame`, whose constructor is a call for each token.
            yield new_tuple(Frame, (kind, call, data[start + HEAD.size : end]))
            start = end
        if start < size:
            self._incomplete += memoryview(data)[start:]

    def _is_complete(self) -> bool:
        """Whether the first frame is complete."""
        if len(self._incomplete) < HEAD.size:
            return False
        length: int = HEAD.unpack_from(self._incomplete)[0]
        return length > self.most_bytes or len(self._incomplete) >= HEAD.size + length


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

    The frames that receivers send at once are written when all received ones are handled.

    `on_frame` gets the frames of the processes, and of calls without a receiver, such as ended
    calls. Buffers are bounded by the windows of the calls. If handling a frame fails, ABORT ends
    its call on both sides. A payload above `most_bytes` ends the connection. `heard_at` is the time
    of the last received bytes, `is_lost` is set after a disconnect. After `close` and `abort` no
    frame is handled.
    """

    def __init__(self, on_frame: Callable[[Frame], None], most_bytes: int = MOST_BYTES) -> None:
        self._on_frame = on_frame
        self._loop = asyncio.get_running_loop()
        self._reader = FrameDecoder(most_bytes)
        self._receivers: dict[int, Receiver] = {}
        self._unsent: list[bytes] = []
        self._due: deque[Callable[[], None]] = deque()
        self._is_scheduled = False
        self._transport: Any = None
        self._lost = asyncio.Event()
        self.is_lost = self._is_ended = False
        self.heard_at = self._loop.time()

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
        if not self._is_scheduled:
            self._schedule()
        self._unsent.append(packed(kind, call, payload))

    def send_first(self, kind: int, call: int, payload: bytes) -> None:
        """Send the first frame of a call: at once, if no other call is under way.

        A lone call shares the write of its turn with none, and would wait for the end of the turn.
        """
        others = len(self._receivers) - (LASTING_CALL in self._receivers)
        if others or self._is_scheduled:
            self.send(kind, call, payload)
        else:
            self._write(packed(kind, call, payload))

    def before_write(self, send: Callable[[], None]) -> None:
        """Call `send` before the next write, which has the frames that it sends.

        It can send what has come in a turn of the event loop as one frame.
        """
        if not self._is_scheduled:
            self._schedule()
        self._due.append(send)

    def close(self) -> None:
        """Send the unsent frames and close the connection."""
        self._is_ended = True
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def hand_over(self, protocol: asyncio.BaseProtocol) -> None:
        """Send the unsent frames, and let another protocol have the connection.

        The channel is never lost then. The other process must send nothing before it has an answer.
        """
        self._flush()
        self._is_ended = True
        transport, self._transport = self._transport, None
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    def limit(self, most_bytes: int) -> None:
        """Change the limit of a payload, for the frames that follow."""
        self._reader.most_bytes = most_bytes

    def abort(self) -> None:
        """Close the connection without the unsent frames; also one that is not made yet."""
        self._is_ended = True
        self._unsent.clear()
        if self._transport is not None:
            self._transport.abort()

    def drop(self, error: FrameTooLong) -> None:
        """Close the connection for a frame that is too long, and log the reason."""
        log.warning("connection dropped", extra={"reason": str(error)})
        self.abort()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self._is_ended:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        may_write = not self._is_scheduled
        self._is_scheduled = True
        try:
            if self._reader.is_one(data):
                self._hear(data)
            else:
                with WRITES:  # each write to a client would wake it between two frames
                    self._hear(data)
        except FrameTooLong as error:
            self.drop(error)
        finally:
            if may_write:
                self._flush()

    def _hear(self, data: bytes) -> None:
        receivers = self._receivers
        for frame in self._reader.feed(data):
            if self._is_ended:
                return
            receiver = receivers.get(frame.call)
            try:
                if receiver is None:
                    self._on_frame(frame)
                else:
                    receiver.hear(frame)
            except Exception:
                # Around one call: the others on the channel continue.
                log.exception("frame not handled", extra={"kind": frame.kind, "call": frame.call})
                self._abort(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
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

    def _schedule(self) -> None:
        self._is_scheduled = True
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        while self._due:
            try:
                self._due.popleft()()
            except Exception:
                # Around one call: the others on the channel continue.
                log.exception("frames not sent")
        # Not earlier: each frame of theirs would schedule a further turn.
        self._is_scheduled = False
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._write(b"".join(unsent))

    def _write(self, frames: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames)


class ChannelCall(Receiver):
    """One end of a call: its windows, and the waiting for its frames."""

    def __init__(self, channel: Channel, call: int) -> None:
        self._channel = channel
        self._call = call
        self._window = SendWindow()
        self._receipts: ReceiveWindow | None = None
        self._waiter: asyncio.Future[None] | None = None

    def hear(self, frame: Frame) -> None:
        if frame.kind == FrameKind.TAKEN:
            self._window.taken(read_number(frame.payload))
        else:
            self._take(frame)

    @abstractmethod
    def _take(self, frame: Frame) -> None:
        """Handle a frame other than TAKEN."""

    def _send_data(self, payload: bytes, kind: int = FrameKind.DATA) -> None:
        self._channel.send(kind, self._call, payload)
        self._window.sent(len(payload))

    def _passed_on(self, size: int) -> None:
        """Count a passed-on frame, and report it to the sender."""
        if self._receipts is None:
            self._receipts = ReceiveWindow()
        if reported := self._receipts.add(size):
            self._channel.send(FrameKind.TAKEN, self._call, number(reported))

    async def _news(self) -> None:
        """Wait for the next frame or disconnect; one task at a time."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
