"""Messages with large tensors: the ends of a call send and receive them in order."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from gateway.cuda_driver import DeviceMemory
from gateway.errors import Code, InferenceError
from gateway.fleet.bulk import BulkConnection, IncomingTensor, as_bytes
from gateway.fleet.handshake import MESSAGE_BYTES
from gateway.messages import InferRequest, SequenceKey
from gateway.processes.channel import LENGTH, MOST_BYTES, number, read_number
from gateway.processes.inference_calls import NS_PER_US
from gateway.processes.inference_messages import LargeData, read_request
from gateway.processes.malformed import malformed
from gateway.tensor import LENGTH_BYTES, Buffer, join_elements

log = logging.getLogger("sluice.fleet")

T = TypeVar("T")

ANNOUNCED_SECS = 60.0
"""Time limit from a message to the announcement of its last tensor: the sender may join strings."""
JOINED_COUNT = 4096
MOST_TENSORS = 1024
"""Large tensors of one message."""


class LargeSender:
    """The large tensors that one end of a call sends, in the order of `send`.

    Strings are joined, and the memory of a GPU is read, in a thread: it `is_busy`, and `on_idle` is
    called after that. `on_sent` gets the size of each message and tensor. The owner of the call
    calls `drop` when it ends.
    """

    __slots__ = ("_bulk", "_call", "_joining", "_on_idle", "_on_sent", "_unsent", "has_sent")

    def __init__(
        self,
        bulk: BulkConnection,
        call: int,
        on_sent: Callable[[int], None],
        on_idle: Callable[[], None],
    ) -> None:
        self._bulk = bulk
        self._call = call
        self._on_sent = on_sent
        self._on_idle = on_idle
        self._unsent: deque[LargeData] = deque()
        self._joining: asyncio.Future[Buffer] | None = None
        self.has_sent = False

    @property
    def is_busy(self) -> bool:
        """Whether a thread makes data."""
        return self._joining is not None

    def send(self, kind: int, message: bytes, large: Sequence[LargeData]) -> None:
        """Send a message, and its large tensors. INVALID_ARG for too much of them."""
        size = LENGTH.size + len(message) + sum(map(sent_bytes, large))
        for name, found, most in (
            ("bytes", size, MOST_BYTES),
            ("large tensors", len(large), MOST_TENSORS),
        ):
            if found > most:
                text = f"a message of a fleet has {found} {name}, expected at most {most}"
                raise InferenceError(Code.INVALID_ARG, text)
        payload = number(len(large)) + message
        self._bulk.channel.send(kind, self._call, payload)
        self._on_sent(len(payload))
        self.has_sent = True
        self._unsent.extend(large)
        self._announce()

    def drop(self) -> None:
        """Send no more."""
        self._unsent.clear()
        if self._joining is not None:
            self._joining.cancel()
            self._joining = None
        if self.has_sent:
            self._bulk.drop(self._call)

    def _announce(self) -> None:
        while self._unsent and self._joining is None:
            data = self._unsent.popleft()
            if isinstance(data, tuple | DeviceMemory):
                loop = asyncio.get_running_loop()
                self._joining = loop.run_in_executor(None, _made, data)
                self._joining.add_done_callback(self._take)
            else:
                self._send(as_bytes(data))

    def _take(self, made: asyncio.Future[Buffer]) -> None:
        if made is not self._joining:
            return
        self._joining = None
        error = made.exception()
        if error is None:
            self._send(as_bytes(made.result()))
        else:
            log.error("tensor not sent", exc_info=error)
            self._send(memoryview(b"\0"))
            self._bulk.drop(self._call)
        self._announce()
        if not self.is_busy:
            self._on_idle()

    def _send(self, data: memoryview) -> None:
        self._bulk.send(self._call, data)
        self._on_sent(len(data))


def sendable(message: bytes) -> bytes:
    """A message that the other end accepts; INVALID_ARG for a longer one."""
    most = MESSAGE_BYTES - LENGTH.size  # the number of its large tensors
    if len(message) > most:
        raise InferenceError(
            Code.INVALID_ARG,
            f"a message of a fleet has {len(message)} bytes without its large tensors, "
            f"expected at most {most}; send fewer parameters and small tensors",
        )
    return message


def sent_bytes(data: LargeData) -> int:
    """The bytes that are sent of a tensor."""
    if isinstance(data, tuple):
        return sum(map(len, data)) + LENGTH_BYTES * len(data)
    return len(data)


def _made(data: tuple[bytes, ...] | DeviceMemory) -> Buffer:
    if isinstance(data, DeviceMemory):
        return data.read()
    joined = bytearray()
    # Some at a time: to join millions, and to free their parts, blocks the event loop.
    for start in range(0, len(data), JOINED_COUNT):
        joined += join_elements(data[start : start + JOINED_COUNT])
    return joined


class Arrival(Generic[T]):
    """A message whose large tensors are arriving; then `read` makes it of both in a thread.

    `on_ready` is called when it can be taken. `sizes` are those of the message and its tensors so
    far. ValueError for a payload that is none.
    """

    def __init__(
        self,
        bulk: BulkConnection,
        payload: bytes,
        read: Callable[[bytes, Sequence[Buffer]], T],
        on_ready: Callable[[], None],
    ) -> None:
        self._bulk = bulk
        self._count, self._message = split(payload)
        self._read = read
        self._on_ready = on_ready
        self._tensors: list[IncomingTensor] = []
        self._complete = 0
        self.sizes = [len(payload)]
        self._size = len(payload)
        self._reading: asyncio.Future[T] | None = None
        self._failed = False
        self._loop = asyncio.get_running_loop()
        self._expiry = self._loop.call_later(ANNOUNCED_SECS, self._fail)

    @property
    def is_announced(self) -> bool:
        """Whether all its tensors are announced."""
        return len(self._tensors) == self._count

    @property
    def is_ready(self) -> bool:
        """Whether it can be taken."""
        return self._failed or (self._reading is not None and self._reading.done())

    def announce(self, payload: bytes) -> int:
        """Receive the next tensor, into memory unless the message has failed; returns its size."""
        tensor = self._bulk.expect(payload, None if self._failed else self._look)
        self._tensors.append(tensor)
        self.sizes.append(tensor.size)
        self._size += tensor.size
        if self.is_announced:
            self._expiry.cancel()
        if self._size > MOST_BYTES:
            self._fail()
        else:
            self._look()  # it may have ended before its announcement
        return tensor.size

    def take(self) -> T:
        """The message; InferenceError if it is malformed, or has not arrived as a whole."""
        if self._reading is not None:
            return self._reading.result()
        raise InferenceError(
            Code.UNAVAILABLE,
            f"large tensors of a message have not arrived: found {len(self._tensors)} of "
            f"{self._count}, complete {sum(each.is_complete for each in self._tensors)}",
        )

    def discard(self) -> None:
        """Free the memory; what still arrives is dropped."""
        self._on_ready = _nothing
        self._fail()
        if self._reading is not None:
            self._reading.cancel()

    def _look(self) -> None:
        """Read the message once everything is there."""
        while self._complete < len(self._tensors) and self._tensors[self._complete].is_over:
            if not self._tensors[self._complete].is_complete:
                self._fail()
                return
            self._complete += 1
        if self._complete == self._count and self._reading is None and not self._failed:
            large = [each.memory for each in self._tensors]
            self._reading = self._loop.run_in_executor(None, self._read, self._message, large)
            self._reading.add_done_callback(lambda _: self._on_ready())

    def _fail(self) -> None:
        """Free the memory; what still arrives is dropped."""
        if self._failed:
            return
        self._failed = True
        self._expiry.cancel()
        for each in self._tensors:
            each.discard()
        self._on_ready()


def split(payload: bytes) -> tuple[int, bytes]:
    """The number of large tensors of a message, and the message without them."""
    if len(payload) < LENGTH.size:
        raise ValueError(f"a message has {len(payload)} bytes, expected at least {LENGTH.size}")
    count = read_number(payload[: LENGTH.size])
    if not 1 <= count <= MOST_TENSORS:
        raise ValueError(f"a message has {count} large tensors, expected 1 to {MOST_TENSORS}")
    return count, payload[LENGTH.size :]


def read_head(payload: bytes) -> InferRequest:
    """A large request without its large tensors; InferenceError for other bytes."""
    try:
        return read_request(split(payload)[1], None)
    except ValueError as error:
        raise malformed("request", payload, error) from error


def time_left(request: InferRequest, began_ns: int) -> int:
    """The timeout of a request less the time in which it has arrived; 0 for none."""
    waited_us = (time.perf_counter_ns() - began_ns) // NS_PER_US
    return max(request.timeout_us - waited_us, 1) if request.timeout_us else 0


_Key = tuple[str, str, SequenceKey]
"""A sequence with the name and the version of its model."""


class ArrivalPlace:
    """The place of a request among those of its sequence."""

    def __init__(self, order: "ArrivalOrder", key: _Key) -> None:
        self._order = order
        self._key = key
        self.begin: Callable[[], None] | None = None

    def reached(self, begin: Callable[[], None]) -> None:
        """Call `begin` as soon as the requests before it have begun or ended."""
        self.begin = begin
        self._order.advance(self._key)

    def leave(self) -> None:
        """Let the requests behind it pass."""
        self.reached(_nothing)


class ArrivalOrder:
    """The order of the requests of sequences, while a large one of them is arriving."""

    def __init__(self) -> None:
        self._places: dict[_Key, deque[ArrivalPlace]] = {}

    def join(self, request: InferRequest, *, is_large: bool) -> ArrivalPlace | None:
        """The place of a request that has to arrive, or is behind one that has; else None."""
        if request.sequence is None:
            return None
        key = request.model, request.version, request.sequence.key
        if not is_large and key not in self._places:
            return None
        place = ArrivalPlace(self, key)
        self._places.setdefault(key, deque()).append(place)
        return place

    def advance(self, key: _Key) -> None:
        """Begin the first requests of a sequence, as far as they have arrived."""
        places = self._places.get(key)
        if places is None:
            return
        while places and (begin := places[0].begin) is not None:
            places.popleft()
            begin()
        if not places:
            self._places.pop(key, None)


def _nothing() -> None:
    """The end of what is discarded."""
