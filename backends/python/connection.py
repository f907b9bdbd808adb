"""Frames over the sockets of one worker."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from backends.python.codec import to_json
from backends.python.worker.sluice_worker.protocol import (
    RECEIVE_BYTES,
    SCARCE,
    BrokenFrame,
    FrameSplitter,
    IncomingSegments,
    OutgoingSegments,
    ToWorker,
    frame,
)

log = logging.getLogger("sluice.python")

UNSENT_BYTES = 256 << 20
"""Limit of unsent bytes; the worker is killed beyond it."""
FULL_BYTES = 1 << 20
"""`room` waits while more bytes than this are unsent."""
RETRY_SECS = 0.05
"""Interval of retries for a message that needs a descriptor or memory while none is free."""
NOT_UNDERSTOOD = (BrokenFrame, ValueError, TypeError, LookupError, OSError)
"""Exceptions of reading a frame that breaks the protocol."""

Frame = tuple[bytes, memoryview]
"""Header and body."""


def _nothing() -> None:
    """After a read that has no reader of its own."""


class FrameSocket:
    """Frames over one socket, for one event loop; `close` ends it.

    `on_frame` gets header and body of each frame. `on_read`, if set, is called after the frames of
    one read. `on_broken` is called at most once, with the reason, when no more frames can arrive.
    If `on_frame` raises an OSError of SCARCE before it has had any effect, the frame is passed to
    it again later, and nothing is read until then.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_frame: Callable[[bytes, memoryview], None],
        on_broken: Callable[[str], None],
    ) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._on_frame = on_frame
        self.on_read: Callable[[], None] = _nothing
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(RECEIVE_BYTES)
        self._received = memoryview(self._buffer)
        self._frames = FrameSplitter()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._wanted = True
        self._reading = False
        self._retry: asyncio.TimerHandle | None = None
        self._stalled: Iterator[Frame] = iter(())
        self._over = False
        self._closed = False
        self._read_or_not()

    def send(self, header: bytes, buffers: Sequence[memoryview | bytes] = ()) -> None:
        """Write a frame; unsent bytes follow when the socket can take them."""
        if self._closed:
            return
        data = frame(header, buffers)
        sent = 0 if self._unsent else self._send(data)
        if sent < len(data):
            self._keep(memoryview(data)[sent:])

    async def room(self) -> None:
        """Wait until at most FULL_BYTES are unsent, or the socket is closed."""
        while self._unsent_bytes > FULL_BYTES and not self._closed:
            waiter = self._loop.create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            finally:  # one after the other: the frame of this one may fill the room again
                self._loop.call_soon(self._wake)

    def pause(self) -> None:
        """Stop reading: the other end blocks once the socket is full."""
        self._wanted = False
        self._read_or_not()

    def resume(self) -> None:
        """Read again, after `pause`."""
        if not self._wanted:
            self._wanted = True
            self._read_or_not()

    def read_rest(self) -> None:
        """Read all that has arrived; for a worker that has ended.

        A frame that waits for its retry comes first. If it fails again, the rest is not read.
        """
        if self._retry is not None:
            self._retry.cancel()
            self._try_again()
        self.resume()
        while self._reading and self._readable():
            """More may have arrived."""

    def close(self) -> None:
        """Close the socket; idempotent."""
        if self._closed:
            return
        self._over = self._closed = True
        self._read_or_not()
        if self._retry is not None:
            self._retry.cancel()
        self._drop_unsent()
        self._socket.close()

    def _readable(self) -> bool:
        """Read once; whether there was something."""
        try:
            size = self._socket.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._break(f"its connection broke: {error.strerror}")
            return False
        if not size:
            self._break("it closed its connection")
            return False
        self._take(self._frames.feed(bytes(self._received[:size])))
        return True

    def _take(self, frames: Iterator[Frame]) -> None:
        current: Frame | None = None
        try:
            for current in frames:
                self._on_frame(*current)
            self.on_read()
        except NOT_UNDERSTOOD as error:
            if current is not None and isinstance(error, OSError) and error.errno in SCARCE:
                self.on_read()
                self._stall(chain([current], frames), error)
                return
            log.exception("message of a Python worker not understood")
            self._break(f"it sent what cannot be understood: {type(error).__name__}")

    def _stall(self, frames: Iterator[Frame], error: OSError) -> None:
        if self._reading:
            log.warning("message of a Python worker delayed", extra={"reason": error.strerror})
        self._stalled = frames
        self._retry = self._loop.call_later(RETRY_SECS, self._try_again)
        self._read_or_not()

    def _try_again(self) -> None:
        self._retry = None
        self._take(self._stalled)
        self._read_or_not()

    def _read_or_not(self) -> None:
        reads = self._wanted and self._retry is None and not self._over
        if reads and not self._reading:
            self._loop.add_reader(self._socket, self._readable)
        elif self._reading and not reads:
            self._loop.remove_reader(self._socket)
        self._reading = reads

    def _break(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self._read_or_not()
            self._on_broken(reason)

    def _send(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)  # the other end has closed; the next read notices it

    def _keep(self, data: memoryview) -> None:
        if not self._unsent:
            self._loop.add_writer(self._socket, self._writable)
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > UNSENT_BYTES:
            self._drop_unsent()
            self._break(f"it left more than {UNSENT_BYTES} bytes unread")

    def _writable(self) -> None:
        data = self._unsent.popleft()
        sent = self._send(data)
        self._unsent_bytes -= sent
        if sent < len(data):
            self._unsent.appendleft(data[sent:])
        if not self._unsent:
            self._drop_unsent()
        else:
            self._wake()

    def _drop_unsent(self) -> None:
        if self._unsent_bytes or not self._closed:
            self._loop.remove_writer(self._socket)
        self._unsent.clear()
        self._unsent_bytes = 0
        self._wake()

    def _wake(self) -> None:
        """Wake the next waiter of `room`, if there is room."""
        while self._waiting and (self._unsent_bytes <= FULL_BYTES or self._closed):
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


@dataclass(frozen=True, slots=True)
class WorkerConnection:
    """The two sockets and the segments of both ends; closed as one."""

    work: FrameSocket
    control: FrameSocket
    incoming: IncomingSegments
    outgoing: OutgoingSegments

    def release(self) -> None:
        """Send the worker its released segments, and the dropped segments of the gateway."""
        if self.incoming.released or self.outgoing.dropped:
            freed, dropped = self.incoming.take_released(), self.outgoing.take_dropped()
            self.control.send(to_json([ToWorker.RELEASED, freed, dropped]))

    def close(self) -> None:
        """Close all; views of the worker's segments stay valid."""
        self.work.close()
        self.control.close()
        self.incoming.close()
        self.outgoing.close()
