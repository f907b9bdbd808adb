"""The connection of large tensors between a router and a replica, besides that of messages.

It carries pieces: a head (number of the tensor, length; little endian) and that part of its bytes.
A piece of length 0 drops the rest of its tensor. The sender announces each tensor on the connection
of messages, with the number and the size, so the receiver has the memory before the first byte.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from itertools import count
from struct import Struct
from typing import Any

import numpy as np

from gateway.fleet.handshake import FleetKind
from gateway.processes.channel import MOST_BYTES, Channel, Frame
from gateway.tensor import Buffer

log = logging.getLogger("sluice.fleet")

HEAD = Struct("<QI")
ANNOUNCEMENT = Struct("<QQ")
"""The payload of an announcement: number and size of a tensor."""
PIECE_BYTES = 512 << 10
"""The longest piece that is sent; the tensors under way are sent in turn, a piece of each."""
TURN_BYTES = 1 << 20
"""Bytes that are received before other work of the event loop gets its turn."""
NO_DATA = memoryview(b"")
DISCARDED_BYTES = 256 << 10
STALLED_SECS = 10.0
"""The connection is dropped if it makes no progress for this time while tensors are under way."""
WATCH_SECS = 1.0


class OutgoingTensor:
    """A tensor of a call that is being sent, without a copy: its memory must not change."""

    __slots__ = ("call", "data", "number", "sent")

    def __init__(self, call: int, number: int, data: memoryview) -> None:
        self.call = call
        self.number = number
        self.data = data
        self.sent = 0


class IncomingTensor:
    """A tensor that is being received into `memory`; `on_end` is called when it ends.

    It ends complete, or incomplete if the sender drops it or the connection is lost. Without
    `on_end` it is discarded.
    """

    __slots__ = ("_on_end", "filled", "is_over", "memory", "size")

    def __init__(self, size: int, on_end: Callable[[], None] | None) -> None:
        self.size = size
        # Unlike bytearray, numpy does not write to the memory first.
        self.memory = NO_DATA if on_end is None else np.empty(size, np.uint8).data
        self.filled = 0
        self.is_over = False
        self._on_end = on_end or _nothing

    @property
    def is_complete(self) -> bool:
        """Whether all bytes have arrived."""
        return self.filled == self.size

    def room(self, size: int) -> memoryview:
        """The memory of the next bytes, at most that many."""
        if not self.memory:
            return memoryview(bytearray(min(size, DISCARDED_BYTES)))
        return self.memory[self.filled : self.filled + size]

    def discard(self) -> None:
        """Free the memory; bytes that still arrive are dropped, and `on_end` is not called."""
        self.memory, self._on_end = NO_DATA, _nothing

    def end(self) -> None:
        """Take the end of the tensor into account."""
        self.is_over = True
        on_end, self._on_end = self._on_end, _nothing  # else its memory is freed by the collector
        on_end()


class BulkConnection(asyncio.BufferedProtocol):
    """One end of the connection; `channel` is that of the messages.

    Tensors may be announced before the connection is made. If it is lost, so is the channel; the
    owner of the channel calls `abort` when that is lost.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self.is_ended = False
        self.is_open = False
        self._outgoing: deque[OutgoingTensor] = deque()
        self.is_full = False
        self._is_sending = False
        self._sent_at = self._received_at = 0.0
        self._numbers = count(1)
        self._incoming: dict[int, IncomingTensor] = {}
        self._announced = 0
        self._head = memoryview(bytearray(HEAD.size))
        self._head_filled = 0
        self._current: IncomingTensor | None = None
        self._left = 0
        self._early_since: float | None = None
        self._received = 0
        self._watch: asyncio.TimerHandle | None = None

    @property
    def is_made(self) -> bool:
        """Whether the connection has been made."""
        return self._transport is not None

    @property
    def is_waiting(self) -> bool:
        """Whether a piece has arrived before the announcement of its tensor."""
        return self._early_since is not None

    # Sending.

    def send(self, call: int, data: memoryview) -> None:
        """Announce a tensor of a call and send it; `drop` ends what is under way."""
        found = OutgoingTensor(call, next(self._numbers), data)
        payload = ANNOUNCEMENT.pack(found.number, len(data))
        self.channel.send(FleetKind.TENSOR, call, payload)
        if not self._outgoing:
            self._sent_at = self._loop.time()
        self._outgoing.append(found)
        self._send_soon()
        self._watch_soon()

    def drop(self, call: int) -> None:
        """Send no more of the tensors of a call; the other end discards what it has of them."""
        for each in self._outgoing:
            if each.call == call:
                each.data = NO_DATA

    def open(self) -> None:
        """Send what there is: the other end receives from now on."""
        self.is_open = True
        self._send_soon()

    def hear(self, frame: Frame) -> None:
        """Handle a frame of no open call: the tensors of an ended one are discarded."""
        if frame.kind == FleetKind.BULK:
            self.open()
        elif frame.kind == FleetKind.TENSOR:
            self.expect(frame.payload)

    def _send_soon(self) -> None:
        waits = self._is_sending or self.is_full or not self.is_open
        if self._outgoing and self._transport is not None and not waits:
            self._is_sending = True
            self._loop.call_soon(self._send_piece)

    def _send_piece(self) -> None:
        """Send one piece; the next one is sent in a later turn of the event loop."""
        self._is_sending = False
        if self.is_full or self.is_ended:
            return
        found = self._outgoing.popleft()
        piece = found.data[found.sent : found.sent + PIECE_BYTES]
        self._sent_at = self._loop.time()
        self._transport.writelines((HEAD.pack(found.number, len(piece)), piece))
        found.sent += len(piece)
        if found.sent < len(found.data):
            self._outgoing.append(found)
        else:
            found.data = NO_DATA
        self._send_soon()

    def pause_writing(self) -> None:
        self.is_full = True
        self._watch_soon()

    def resume_writing(self) -> None:
        self.is_full = False
        self._send_soon()

    # Receiving.

    def expect(self, payload: bytes, on_end: Callable[[], None] | None = None) -> IncomingTensor:
        """Receive a tensor that the other end has announced; without `on_end` it is discarded."""
        number, size = self._announcement(payload)
        found = IncomingTensor(size, on_end)
        if self.is_ended:
            self._loop.call_soon(found.end)
            return found
        if not self._incoming:
            self._received_at = self._loop.time()
        self._incoming[number] = found
        self._watch_soon()
        if self._early_since is not None and self._head_number() == number:
            self._early_since = None
            self._begin_piece()
            self._read_on()
        return found

    def _announcement(self, payload: bytes) -> tuple[int, int]:
        """The number and the size of the next tensor; the connection is dropped for another one."""
        if len(payload) != ANNOUNCEMENT.size:
            expected = ANNOUNCEMENT.size
            self._drop(f"an announcement of {len(payload)} bytes, expected {expected} bytes")
            return 0, 0
        number, size = ANNOUNCEMENT.unpack(payload)
        self._announced += 1
        if number != self._announced:
            self._drop(f"tensor {number} is announced, expected tensor {self._announced}")
            return number, 0
        if not 0 < size <= MOST_BYTES:
            self._drop(f"a tensor of {size} bytes is announced, expected 1 to {MOST_BYTES}")
            return number, 0
        return number, size

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._current is None:
            return self._head[self._head_filled :]
        return self._current.room(self._left)

    def buffer_updated(self, size: int) -> None:
        self._received_at = self._loop.time()
        self._received += size
        if self._received >= TURN_BYTES:
            self._received = 0
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)
        if self._current is not None:
            self._take(self._current, size)
            return
        self._head_filled += size
        if self._head_filled == HEAD.size:
            self._begin_piece()

    def _head_number(self) -> int:
        number: int = HEAD.unpack(self._head)[0]
        return number

    def _begin_piece(self) -> None:
        number, length = HEAD.unpack(self._head)
        found = self._incoming.get(number)
        if found is None and number > self._announced:
            # Its announcement is still under way, on the other connection.
            self._early_since = self._loop.time()
            self._transport.pause_reading()
            self._watch_soon()
            return
        self._head_filled = 0
        if found is None:
            self._drop(f"a piece of tensor {number}, which is not under way")
        elif length > found.size - found.filled:
            left = found.size - found.filled
            self._drop(f"a piece of {length} bytes, of a tensor that lacks {left} bytes")
        elif length:
            self._current, self._left = found, length
        else:
            del self._incoming[number]
            found.end()

    def _take(self, found: IncomingTensor, size: int) -> None:
        found.filled += size
        self._left -= size
        if self._left:
            return
        self._current = None
        if found.is_complete:
            del self._incoming[self._head_number()]
            found.end()

    def _read_on(self) -> None:
        if not self.is_waiting and not self.is_ended:
            self._transport.resume_reading()

    # The connection.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self.is_ended:
            transport.abort()
            return
        # Full is what the system does not take: the tensors wait here, where they can be dropped.
        # With a limit of 0 TLS is also full while it is empty, and remains so.
        transport.set_write_buffer_limits(1, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort()

    def abort(self) -> None:
        """Disconnect, the channel as well: what is under way ends incomplete."""
        if self.is_ended:
            return
        self.is_ended = True
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()
        self.channel.abort()
        self._outgoing.clear()
        incoming, self._incoming = self._incoming, {}
        for each in incoming.values():
            each.end()

    def _drop(self, reason: str) -> None:
        log.warning("connection dropped", extra={"reason": reason})
        self.abort()

    def _watch_soon(self) -> None:
        if self._watch is None and not self.is_ended:
            self._watch = self._loop.call_later(WATCH_SECS, self._look_for_stalls)

    def _look_for_stalls(self) -> None:
        self._watch = None
        waits = []
        if self._incoming:
            waits.append(self._received_at)
        if self._outgoing or self.is_full:
            waits.append(self._sent_at)
        if self._early_since is not None:
            waits.append(self._early_since)
        if not waits:
            return
        if self._loop.time() - min(waits) >= STALLED_SECS:
            self._drop(f"large tensors have made no progress for {STALLED_SECS:g} s")
        else:
            self._watch_soon()


def as_bytes(data: Buffer) -> memoryview:
    """A view of single bytes."""
    view = memoryview(data)
    return view if view.format == "B" else view.cast("B")


def _nothing() -> None:
    """The end of a tensor that is discarded."""
