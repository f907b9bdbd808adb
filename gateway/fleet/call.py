"""A request of a router at a replica."""

from collections.abc import Callable
from time import monotonic

from gateway.conversations.turn import answer_text, is_turn
from gateway.fleet.bulk import BulkConnection
from gateway.fleet.choice import KnownReplica
from gateway.fleet.handshake import FleetKind
from gateway.fleet.large import Arrival, LargeSender, sendable
from gateway.generation import TEXT_OUTPUT
from gateway.messages import InferRequest, InferResponse
from gateway.processes.channel import MOST_BYTES, Frame, number
from gateway.processes.inference_calls import InferenceKind, RequestingEnd, waited_us
from gateway.processes.inference_messages import LargeData, read_response, write_request
from gateway.processes.request_terms import Routing
from gateway.processes.text_runs import read_run


class ReplicaCall(RequestingEnd):
    """A call to a replica; its load counts the call until `leave`.

    `expected_secs` is the time until its first response, `expected_tokens` those of its prompt that
    the engine has in its cache, as expected when it was sent; a part of a response ends the
    waiting: it `has_begun`. `on_texts` gets the payloads of frames of texts, as they come while
    nothing is unread; it returns False for those that `take` has to take. GONE ends every turn of a
    conversation. Before its end it has the bytes of the answer that were taken: the replica
    remembers no more.
    """

    def __init__(
        self,
        bulk: BulkConnection,
        number: int,
        request: InferRequest,
        known: KnownReplica,
        on_news: Callable[[], None],
        routing: Routing | None = None,
    ) -> None:
        self._bulk = bulk
        self._sender = _sent(bulk, number, request, routing)
        self._arrivals: list[Arrival[InferResponse]] = []
        self._has_large = self.has_begun = False
        self._answer_bytes = 0 if is_turn(request) else None
        self.on_texts: Callable[[bytes], bool] = _untaken
        super().__init__(bulk.channel, number, f"model '{request.model}': its replica", on_news)
        self._known = known
        self.expected_secs, self.expected_tokens = 0.0, 0
        self._sent_at = monotonic()

    @property
    def age_secs(self) -> float:
        """The time since it was sent."""
        return monotonic() - self._sent_at

    @property
    def is_lost(self) -> bool:
        return (self._is_lost or self._bulk.is_ended) and not self.is_over

    def take(self) -> InferResponse | None:
        frame = None if self._responses or not self._frames else self._frames[0]
        is_large = frame is not None and frame.kind == FleetKind.LARGE_DATA
        response = self._take_large() if is_large else super().take()
        if self._answer_bytes is not None and response is not None:
            self._answer_bytes += memoryview(answer_text(response)).nbytes
        return response

    def _take_large(self) -> InferResponse | None:
        arrival = self._arrivals[0]
        if not arrival.is_ready:
            if not arrival.is_announced:
                self._check_lost()
            return None
        del self._frames[0], self._arrivals[0]
        for size in arrival.sizes:
            self._unread_bytes -= size
            self._passed_on(size)
        return arrival.take()

    def take_texts(self) -> bool:
        """Pass the next frame to `on_texts`; False if `take` has to take it."""
        frame = None if self._responses or not self._frames else self._frames[0]
        if frame is None or frame.kind != InferenceKind.TEXTS or not self.on_texts(frame.payload):
            return False
        if self._answer_bytes is not None:
            self._count_texts(frame.payload)
        self._read(self._frames.popleft())
        return True

    def leave(self) -> int:
        self._known.end(self._call)
        if self._sender is not None:
            self._sender.drop()
        for each in self._arrivals:
            each.discard()
        if self.is_over and (self._has_large or self._answer_bytes is not None):
            # The replica waits for it: it may be about to disconnect, or to copy the conversation.
            self._channel.send(FleetKind.GONE, self._call)
        return super().leave()

    def _farewell(self) -> bytes:
        return b"" if self._answer_bytes is None else number(min(self._answer_bytes, MOST_BYTES))

    def _count_texts(self, payload: bytes) -> None:
        run = read_run(payload)
        if self._answer_bytes is not None and run.name == TEXT_OUTPUT:
            self._answer_bytes += sum(map(len, run.texts))

    def _take(self, frame: Frame) -> None:
        if (
            frame.kind == InferenceKind.TEXTS
            and not (self._frames or self._responses)
            and self.on_texts(frame.payload)
        ):
            if self._answer_bytes is not None:
                self._count_texts(frame.payload)
            self._passed_on(len(frame.payload))
            return
        if not self.has_begun:
            self.has_begun = True
            self._known.begin(self._call)
        if frame.kind == FleetKind.TENSOR:
            self._unread_bytes += self._announce(frame.payload)
            return
        if frame.kind == FleetKind.LARGE_DATA:
            if self._arrivals and not self._arrivals[-1].is_announced:
                raise ValueError("its replica sends a response before the tensors of the last one")
            self._has_large = True
            arrival = Arrival(self._bulk, frame.payload, read_response, self._wake)
            self._arrivals.append(arrival)
        super()._take(frame)

    def _announce(self, payload: bytes) -> int:
        """Have a tensor received; its size."""
        for arrival in self._arrivals:
            if not arrival.is_announced:
                return arrival.announce(payload)
        self._bulk.expect(payload)
        raise ValueError("its replica announces a tensor that belongs to no response")


def _sent(
    bulk: BulkConnection, number: int, request: InferRequest, routing: Routing | None
) -> LargeSender | None:
    """Send a request; the sender of its large tensors, if it has some."""
    large: list[LargeData] = []
    waited = waited_us(request) if request.timeout_us else 0
    message = sendable(write_request(request, waited, large, routing))
    if not large:
        bulk.channel.send_first(InferenceKind.REQUEST, number, message)
        return None
    sender = LargeSender(bulk, number, _unlimited, _unheeded)
    sender.send(FleetKind.LARGE_REQUEST, message, large)
    return sender


def _untaken(payload: bytes) -> bool:
    """Texts before the first response."""
    return False


def _unlimited(size: int) -> None:
    """A part of a request: it waits for no window."""


def _unheeded() -> None:
    """A sent request: nothing waits for its end."""
