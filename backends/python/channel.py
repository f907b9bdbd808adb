"""One socket to a worker: frames out and frames in, without ever holding up the event loop."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence

from backends.python.worker.sluice_worker.frames import (
    RECEIVE_BYTES,
    BrokenFrame,
    FrameReader,
    frame,
)

log = logging.getLogger("sluice.python")

UNSENT_BYTES = 256 << 20
"""A worker that leaves more than this unread has lost its mind."""
FULL_BYTES = 1 << 20
"""From here on whoever can wait should."""
NOT_UNDERSTOOD = (BrokenFrame, ValueError, TypeError, LookupError, OSError)
"""What reading a frame raises if the other end has not kept to the protocol."""


class Channel:
    """Frames over one socket, for one event loop; `close` ends it.

    `on_frame` is called with header and body of each frame, `on_read` after all that came at
    once, `on_lost` at most once with the reason if no more can come.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_frame: Callable[[bytes, memoryview], None],
        on_read: Callable[[], None],
        on_lost: Callable[[str], None],
    ) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._on_frame = on_frame
        self._on_read = on_read
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(RECEIVE_BYTES)
        self._received = memoryview(self._buffer)
        self._frames = FrameReader()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._reading = False
        self._over = False
        self._closed = False
        self.resume()

    def send(self, header: bytes, buffers: Sequence[memoryview | bytes] = ()) -> None:
        """Write a frame; what the socket does not take at once follows as soon as it does."""
        if self._closed:
            return
        data = frame(header, buffers)
        sent = 0 if self._unsent else self._send(data)
        if sent < len(data):
            self._keep(memoryview(data)[sent:])

    async def room(self) -> None:
        """Wait until the other end has read most of what it was sent, or has gone."""
        while self._unsent_bytes > FULL_BYTES and not self._closed:
            waiter = self._loop.create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            finally:  # one after the other: what this one sends may leave no room for the next
                self._loop.call_soon(self._wake)

    def pause(self) -> None:
        """Read nothing for now: whoever writes is held back."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket)

    def resume(self) -> None:
        """Read, if that was not so already."""
        if not self._reading and not self._over:
            self._reading = True
            self._loop.add_reader(self._socket, self._readable)

    def read_rest(self) -> None:
        """Read all that is there now; for when the other end has ended."""
        self.resume()
        while self._reading and self._readable():
            """There may be more."""

    def close(self) -> None:
        """Let go of the socket; idempotent."""
        if self._closed:
            return
        self.pause()
        self._over = self._closed = True
        self._drop_unsent()
        self._socket.close()

    def _readable(self) -> bool:
        """Read once; whether there was something."""
        try:
            size = self._socket.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._lose(f"its connection broke: {error.strerror}")
            return False
        if not size:
            self._lose("it closed its connection")
            return False
        self._take(bytes(self._received[:size]))
        return True

    def _take(self, data: bytes) -> None:
        try:
            for header, body in self._frames.feed(data):
                self._on_frame(header, body)
            self._on_read()
        except NOT_UNDERSTOOD as error:
            log.exception("message of a Python worker not understood")
            self._lose(f"it sent what cannot be understood: {type(error).__name__}")

    def _lose(self, reason: str) -> None:
        self.pause()
        if not self._over:
            self._over = True
            self._on_lost(reason)

    def _send(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)  # the other end has gone, which reading will tell

    def _keep(self, data: memoryview) -> None:
        if not self._unsent:
            self._loop.add_writer(self._socket, self._writable)
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > UNSENT_BYTES:
            self._drop_unsent()
            self._lose(f"it left more than {UNSENT_BYTES} bytes unread")

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
        """Let the next one go on who waits for room, if there is some."""
        while self._waiting and (self._unsent_bytes <= FULL_BYTES or self._closed):
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
