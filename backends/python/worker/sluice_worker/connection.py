"""The worker's ends of the sockets: frames, and the tensors and responses in them."""

import json
import os
import select
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .errors import ErrorCode, TritonError
from .protocol import SHARED_FROM_BYTES, IncomingSegments, OutgoingSegments, ToGateway, frame
from .response import InferenceResponse
from .tensor import Tensor

Buffer = bytes | memoryview
RECEIVE_BYTES = 1 << 16
"""Bytes read at once; larger blocks would be mapped and unmapped for each message."""
_decode = json.JSONDecoder().raw_decode

INLINE_BYTES = 16 << 20
"""Bytes of large tensors that a message may hold if no further segment can be made."""


def _encoder() -> Callable[[Sequence[Any]], str]:
    """JSON text of a header, by one encoder for all: the library makes one for each text."""
    found = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
    make, quote = getattr(json.encoder, "c_make_encoder", None), json.encoder.encode_basestring
    if make is None:  # a Python without the library's C code
        return found.encode
    # As `JSONEncoder.iterencode` calls it: no check for cycles, no indent; NaN is allowed.
    chunks = make(None, found.default, quote, None, ":", ",", False, False, True)
    return lambda header: "".join(chunks(header, 0))


encode = _encoder()


class GatewayConnection:
    """Sockets and segments to the gateway; a process without its gateway ends at once."""

    def __init__(
        self, work: socket.socket, control: socket.socket, descriptors: socket.socket
    ) -> None:
        self.outgoing = OutgoingSegments(descriptors)
        self.incoming = IncomingSegments(descriptors)
        self._sockets = (work, control, descriptors)
        self._work, self._control = work, control
        self._work_lock, self._control_lock = threading.Lock(), threading.Lock()
        # Two, since a poll object is for one thread at a time; unlike select, with any descriptor.
        self._waiting, self._asking = _poll(work), _poll(work)
        self._late: deque[bytes] = deque()
        self._gathered: list[bytes] | None = None
        self._gatherer = 0
        # A process that model.py forks must not keep the sockets open after this one ends.
        os.register_at_fork(after_in_child=self._close)

    def receive_work(self) -> bytes:
        """The next bytes over `work`; none if the gateway has closed it."""
        return _receive(self._work)

    def wait_work(self) -> None:
        """Wait until bytes have arrived over `work`, or the gateway has closed it."""
        self._waiting.poll()

    def receive_work_now(self) -> bytes | None:
        """Bytes that have arrived over `work`; None if there are none now."""
        try:
            return self._work.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def has_work(self) -> bool:
        """Whether bytes have arrived over `work` that are not yet received."""
        return bool(self._asking.poll(0))

    def receive_control(self) -> bytes:
        """The next bytes over `control`; none if the gateway has closed it."""
        return _receive(self._control)

    def send(self, header: Sequence[Any], buffers: Sequence[Buffer] = ()) -> None:
        """Send one message over `work`, and the segments released since the last one."""
        data = frame(encode(header).encode(errors="replace"), buffers)
        if released := self._released():
            data = released + data
        if self._gathered is not None and self._gatherer == threading.get_ident():
            self._gathered.append(data)
            return
        with self._work_lock:
            _send(self._work, data)
        if self._late:
            self._send_late()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Messages that this thread sends over `work` in the block leave together at its end.

        Only one thread of a process may do so, and nothing in the block may wait for an answer.
        """
        self._gathered, self._gatherer = [], threading.get_ident()
        try:
            yield
        finally:
            data, self._gathered = b"".join(self._gathered), None
            if data:
                with self._work_lock:
                    _send(self._work, data)
                if self._late:
                    self._send_late()

    def send_control(self, header: Sequence[Any]) -> None:
        """Send one message over `control`."""
        data = frame(encode(header).encode())
        with self._control_lock:
            _send(self._control, data)

    def send_from_finalizer(self, header: Sequence[Any]) -> None:
        """Send over `work` from a `__del__`, which may run while this thread is sending."""
        self._late.append(frame(encode(header).encode(errors="replace")))
        self._send_late()

    def send_released(self) -> None:
        """Send the released segments, if any, over `control`; `work` may be full."""
        if released := self._released():
            with self._control_lock:
                _send(self._control, released)

    def _released(self) -> bytes:
        if not self.incoming.released and not self.outgoing.dropped:
            return b""
        freed, dropped = self.incoming.take_released(), self.outgoing.take_dropped()
        if not freed and not dropped:
            return b""
        return frame(encode([ToGateway.RELEASED, freed, dropped]).encode())

    def _send_late(self) -> None:
        # The holder of the lock checks `_late` again after its release.
        while self._late and self._work_lock.acquire(blocking=False):
            try:
                while self._late:
                    _send(self._work, self._late.popleft())
            finally:
                self._work_lock.release()

    def _close(self) -> None:
        for each in self._sockets:
            each.close()


def _poll(source: socket.socket) -> "select.poll":
    found = select.poll()
    found.register(source, select.POLLIN)
    return found


def _receive(source: socket.socket) -> bytes:
    try:
        return source.recv(RECEIVE_BYTES)
    except OSError:
        return b""


def _send(to: socket.socket, data: bytes) -> None:
    try:
        to.sendall(data)
    except OSError:
        end_group()


def end_group() -> None:
    """End this process and all processes that model.py has started."""
    if os.getpgrp() == os.getpid():  # the gateway makes a worker the leader of a group
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


class Packing:
    """The body of one message, in the order of its header."""

    __slots__ = ("_connection", "_placed", "buffers")

    def __init__(self, connection: GatewayConnection) -> None:
        self._connection = connection
        self._placed: tuple[int, ...] = ()
        self.buffers: list[Buffer] = []

    def tensor(self, tensor: Tensor) -> list[Any]:
        """A tensor for the header; its bytes into the body or a segment.

        OSError if there is no memory for a segment.
        """
        datatype, shape, data = tensor.wire()
        size = len(data)
        if size < SHARED_FROM_BYTES:
            self.buffers.append(data)
            return [tensor.name(), datatype, shape, size, 0]
        return [tensor.name(), datatype, shape, size, self._place(data)]

    def _place(self, data: Buffer) -> int:
        try:
            number = self._connection.outgoing.place(memoryview(data))
        except OSError:
            # Without a free file descriptor a few tensors go into the message.
            if sum([len(each) for each in self.buffers]) + len(data) > INLINE_BYTES:
                raise
            self.buffers.append(data)
            return 0
        self._placed += (number,)
        return number

    def give_back(self, begun: int = 0) -> None:
        """Free the segments after the first `begun`: no message has named them."""
        self._connection.outgoing.freed(self._placed[begun:])
        self._placed = self._placed[:begun]

    def response(self, response: InferenceResponse, wanted: Container[str]) -> list[Any]:
        """A response for the header, with the wanted ones of its outputs."""
        error = response.error()
        parameters = response.given_parameters
        if error is not None:
            return [[], [error.code().name, error.message()], parameters]
        begun, placed = len(self.buffers), len(self._placed)
        try:
            outputs = [
                self.tensor(each) for each in response.output_tensors() if each.name() in wanted
            ]
        except OSError as failure:
            del self.buffers[begun:]
            self.give_back(placed)
            text = f"no memory to share for the outputs: {failure.strerror}"
            return [[], [ErrorCode.INTERNAL.name, text], parameters]
        return [outputs, None, parameters]


class Unpacking:
    """Cuts the body of one message, in the order of its header."""

    __slots__ = ("_body", "_connection", "_start")

    def __init__(self, connection: GatewayConnection, body: memoryview) -> None:
        self._connection, self._body = connection, body
        self._start = 0

    def tensors(self, headers: Sequence[Any]) -> list[Tensor]:
        """The next tensors; each segment is viewed at once, or it would never be released."""
        found = []
        for name, datatype, shape, size, segment in headers:
            if segment:
                data = self._connection.incoming.view(segment, size)
            else:
                data = self._body[self._start : self._start + size]
                self._start += size
            found.append(Tensor.received(name, datatype, shape, data))
        return found

    def response(self, header: Any) -> InferenceResponse:
        """A response of another model; an empty one for the final flag alone."""
        if header is None:
            return InferenceResponse()
        outputs, error, parameters = header
        failure = None if error is None else TritonError(error[1], ErrorCode[error[0]])
        response = InferenceResponse(self.tensors(outputs), failure)
        response.given_parameters = parameters
        return response


def parsed(header: bytes) -> Any:
    """A header from its bytes; lone surrogates are kept."""
    return _decode(header.decode(errors="surrogatepass"))[0]
