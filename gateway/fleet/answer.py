"""The answer of a replica to a request of a router."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from gateway.errors import Code, InferenceError, LostError, unexpected
from gateway.fleet.bulk import BulkConnection
from gateway.fleet.copies import CopiedTurn
from gateway.fleet.handshake import FleetKind
from gateway.fleet.large import Arrival, LargeSender, sendable, time_left
from gateway.fleet.meter import MeteredPrompt
from gateway.messages import InferRequest, InferResponse
from gateway.observability.trace import Trace
from gateway.processes.channel import ChannelCall, Frame
from gateway.processes.error_messages import write_error
from gateway.processes.inference_calls import InferenceKind
from gateway.processes.inference_messages import LargeData, read_request, write_response
from gateway.processes.text_runs import take_run
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.fleet")


class RoutedAnswer(ChannelCall):
    """The answer to a request of a router: a stream of the data plane, read without a task.

    `turn` is that of an accepted request, if it is one. GONE, ABORT and a lost router cancel the
    stream; then `passed_on` is the payload, else None. While the router does not acknowledge what
    was sent, responses remain in the stream, which holds back the model. `final_ends` is that of
    the router's HELLO.
    """

    def __init__(self, bulk: BulkConnection, call: int, *, final_ends: bool = False) -> None:
        super().__init__(bulk.channel, call)
        self._bulk = bulk
        self._final_ends = final_ends
        self._sender: LargeSender | None = None
        self._arrival: Arrival[InferRequest] | None = None
        self._stream: ResponseStream | None = None
        self._taken: deque[InferResponse] = deque()
        self._is_due = False
        self._ended: Callable[[], None] = _nothing
        self._metered: MeteredPrompt | None = None
        self._is_over = False
        self.received_ns = time.perf_counter_ns()
        self.trace: Trace | None = None
        self.turn: CopiedTurn | None = None
        self.passed_on: bytes | None = None

    def open(self, ended: Callable[[], None]) -> None:
        """Take part in the call; `ended` is called when it ends."""
        self._ended = ended
        self._channel.join(self._call, self)

    def receive(self, payload: bytes, arrived: Callable[[InferRequest], None]) -> None:
        """Receive a large request, and pass it on."""

        def pass_on() -> None:
            arrival, self._arrival = self._arrival, None
            if arrival is None:
                return
            try:
                request = arrival.take()
            except InferenceError as error:
                self.fail(error)
                return
            except Exception:
                # Around one request: it was read in a thread.
                log.exception("request not read")
                self.fail(unexpected())
                return
            timeout_us = time_left(request, self.received_ns)
            arrived(replace(request, received_ns=self.received_ns, timeout_us=timeout_us))

        read = partial(read_request, received_ns=self.received_ns)
        self._arrival = Arrival(self._bulk, payload, read, pass_on)

    def begin(self, stream: ResponseStream, metered: MeteredPrompt | None) -> None:
        """Send the responses of a stream."""
        self._stream, self._metered = stream, metered
        stream.listen(self._look_soon)

    def refuse(self, error: InferenceError) -> None:
        """Send the end of a request that was not accepted."""
        self._channel.send(InferenceKind.REFUSED, self._call, write_error(error))

    def fail(self, error: InferenceError) -> None:
        """Send the error that ends the call."""
        self.refuse(error)
        self._finish()

    def hear(self, frame: Frame) -> None:
        super().hear(frame)
        if frame.kind == InferenceKind.TAKEN:
            self._look_soon()

    def lose(self) -> None:
        if self._stream is not None:
            self._stream.cancel(LostError())
        self._leave(b"")

    def _take(self, frame: Frame) -> None:
        if frame.kind in (InferenceKind.GONE, InferenceKind.ABORT):
            self._leave(frame.payload)
        elif frame.kind == FleetKind.TENSOR:
            if self._arrival is None or self._arrival.is_announced:
                self._bulk.hear(frame)
            else:
                self._arrival.announce(frame.payload)

    def _look_soon(self) -> None:
        """Send the responses of this turn of the event loop at its end, texts in one frame."""
        if not self._is_due:
            self._is_due = True
            self._channel.before_write(self._look)

    def _look(self) -> None:
        """Send the responses that are there, as far as the window has room."""
        self._is_due = False
        while (
            (stream := self._stream) is not None
            and self._window.has_room
            and not (self._sender is not None and self._sender.is_busy)
        ):
            try:
                if not self._taken and not self._take_from(stream):
                    return
                if self._metered is not None:
                    self._metered.respond(self._taken[0])
                texts = take_run(self._taken)
                if texts is None:
                    self._send(self._taken.popleft())
                else:
                    self._send_data(texts, InferenceKind.TEXTS)
            except InferenceError as error:
                self.fail(error)
            except Exception:
                # Around one request: its model has made a value that no message can have.
                log.exception("response not sent")
                self.fail(unexpected())

    def _take_from(self, stream: ResponseStream) -> bool:
        """Take the responses that are there; False if there are none now, or no more at all."""
        responses = stream.take()
        if responses is None:
            return False
        self._taken.extend(responses)
        if not responses:
            self._channel.send(InferenceKind.END, self._call)
            self._finish()
        return bool(responses)

    def _send(self, response: InferResponse) -> None:
        large: list[LargeData] = []
        message = sendable(write_response(response, large))
        if large:
            if self._sender is None:
                self._sender = LargeSender(
                    self._bulk, self._call, self._window.sent, self._look_soon
                )
            self._sender.send(FleetKind.LARGE_DATA, message, large)
            return
        self._send_data(message)
        if response.final and self._final_ends:
            self._finish()

    def _finish(self) -> None:
        """End the stream; the call ends once the router has its large tensors, with GONE."""
        self._end_stream()
        if self._sender is None or not self._sender.has_sent:
            self._close()

    def _leave(self, passed_on: bytes) -> None:
        self.passed_on = passed_on
        self._close()

    def _close(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._channel.leave(self._call)
        if self._sender is not None:
            self._sender.drop()
        if self._arrival is not None:
            self._arrival.discard()
        self._end_stream()
        self._ended()

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
            if self._metered is not None:
                self._metered.end()


def version_of(request: InferRequest) -> int:
    """The version that a router has chosen."""
    if request.version.isascii() and request.version.isdigit():
        return int(request.version)
    text = f"model '{request.model}': found version {request.version!a}, expected a number"
    raise InferenceError(Code.INVALID_ARG, text)


def _nothing() -> None:
    """The end of an answer that has not begun."""
