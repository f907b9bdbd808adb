"""Both ends of a call that carries a request to another process, and its responses back.

The payloads are those of `inference_messages`.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing

from gateway.errors import InferenceError, died, unexpected
from gateway.messages import InferRequest, InferResponse
from gateway.processes.channel import Channel, ChannelCall, Frame, FrameKind
from gateway.processes.error_messages import read_error, write_error
from gateway.processes.inference_messages import (
    read_request,
    read_response,
    write_request,
    write_response,
)
from gateway.processes.text_runs import read_run
from gateway.processes.windows import WINDOW_BYTES

log = logging.getLogger("sluice.server")

NS_PER_US = 1000

Respond = Callable[[InferRequest], AsyncGenerator[InferResponse, None]]
"""Makes the responses to a request; InferenceError ends it. The generator is always closed."""


class InferenceKind(FrameKind):
    """Kinds of frames of every channel with requests; a frame of DATA is one response."""

    REQUEST = 7  # starts a call: a request
    REFUSED = 8  # ends a call: an error
    TEXTS = 9  # some responses, each of one text


RESPONSES = frozenset((InferenceKind.DATA, InferenceKind.TEXTS))
"""Kinds of frames that carry responses."""

ENDS = (InferenceKind.END, InferenceKind.REFUSED, InferenceKind.ABORT)
"""Kinds of frames that end a call."""


def tokens(frame: Frame) -> int:
    """The number of completion tokens in a frame; 0 in a malformed one."""
    if frame.kind not in RESPONSES:
        return 0
    try:
        return completion_tokens(_responses(frame))
    except InferenceError:
        return 0


def completion_tokens(responses: Iterable[InferResponse]) -> int:
    """The number of completion tokens of responses."""
    return sum(each.usage.completion_tokens for each in responses if each.usage is not None)


def _responses(frame: Frame) -> Sequence[InferResponse]:
    """The responses of a frame of `RESPONSES`; InferenceError for other bytes."""
    if frame.kind == InferenceKind.TEXTS:
        return read_run(frame.payload).responses()
    return (read_response(frame.payload),)


class RequestingEnd(ChannelCall):
    """The end of the process with the request; its owner sends the first frame.

    One task reads `responses`, or `on_news` is called whenever there may be something to `take`;
    then `leave` ends the call, which `is_over` after its last response: that with the final flag,
    or the one before END. `peer` names the answering process in errors, such as `model 'm': its
    engine`.
    """

    def __init__(
        self,
        channel: Channel,
        call: int,
        peer: str,
        on_news: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(channel, call)
        self._peer = peer
        self._on_news = on_news
        self._frames: deque[Frame] = deque()
        self._responses: deque[InferResponse] = deque()
        self._unread_bytes = 0
        self._is_lost = False
        self.is_over = False
        channel.join(call, self)

    @property
    def is_lost(self) -> bool:
        """Whether the other process has disconnected before the end of the call."""
        return self._is_lost and not self.is_over

    @property
    def has_unread(self) -> bool:
        """Whether a response, or a part of one, or an end has arrived that is not taken."""
        return bool(self._frames or self._responses)

    async def responses(self) -> AsyncGenerator[InferResponse, None]:
        """The responses; raises as `take`."""
        while True:
            response = self.take()
            if response is not None:
                yield response
            elif self.is_over:
                return
            else:
                await self._news()

    def take(self) -> InferResponse | None:
        """The next response; None if it `is_over`, or a reader has to wait.

        Raises InferenceError if the request is refused, or the process exits.
        """
        if self._responses:
            return self._responses.popleft()
        if not self._frames:
            self._check_lost()
            return None
        frame = self._frames.popleft()
        if frame.kind == InferenceKind.DATA:
            response = read_response(frame.payload)
            self.is_over = response.final
            if not response.final:  # its sender waits for no room
                self._read(frame)
            return response
        if frame.kind == InferenceKind.TEXTS:
            self._read(frame)
            self._responses.extend(read_run(frame.payload).responses())
            return self._responses.popleft()
        self.is_over = True
        if frame.kind == InferenceKind.REFUSED:
            raise read_error(frame.payload)
        if frame.kind == InferenceKind.ABORT:
            raise unexpected()
        return None

    def _read(self, frame: Frame) -> None:
        """Count a frame as read, and report it to the sender."""
        self._unread_bytes -= len(frame.payload)
        self._passed_on(len(frame.payload))

    def _check_lost(self) -> None:
        if self.is_lost:
            raise died(f"{self._peer} has stopped; retry shortly")

    def leave(self) -> int:
        """End the call; returns the number of received unread tokens."""
        self._channel.leave(self._call)
        if self.is_over or self._is_lost:
            return 0
        self._channel.send(InferenceKind.GONE, self._call, self._farewell())
        return completion_tokens(self._responses) + sum(map(tokens, self._frames))

    def _farewell(self) -> bytes:
        """The payload of GONE."""
        return b""

    def lose(self) -> None:
        self._is_lost = True
        self._wake()

    def _take(self, frame: Frame) -> None:
        if self._unread_bytes > WINDOW_BYTES and frame.kind not in ENDS:
            # The channel ends the call on both sides.
            raise ValueError(f"{self._peer} sends beyond the window of {WINDOW_BYTES} bytes")
        self._unread_bytes += len(frame.payload)
        self._frames.append(frame)
        if self._on_news is not None:  # as `_wake`, without a call for each token
            self._on_news()
        else:
            self._wake()

    def _wake(self) -> None:
        if self._on_news is None:
            super()._wake()
        else:
            self._on_news()


def request_payload(request: InferRequest) -> bytes:
    """The payload of a frame of REQUEST; raises as `write_request`."""
    return write_request(request, waited_us(request))


def waited_us(request: InferRequest) -> int:
    """The part of the timeout of a request that has passed."""
    if not request.timeout_us or not request.received_ns:
        return 0
    return (time.perf_counter_ns() - request.received_ns) // NS_PER_US


class AnsweringEnd(ChannelCall):
    """The end of the process with the answer: `task` runs it, and GONE or ABORT cancels that."""

    def __init__(self, channel: Channel, call: int, payload: bytes) -> None:
        super().__init__(channel, call)
        self.task: asyncio.Task[None] | None = None
        self._payload = payload
        self._is_gone = False
        channel.join(call, self)

    async def run(self, respond: Respond) -> None:
        """Answer the request; in every case the other process gets the end of the call."""
        error: InferenceError | None = unexpected()
        try:
            await self._answer(respond)
            error = None
        except InferenceError as found:
            error = found
        except Exception:
            # Around one request: the client gets no details.
            log.exception("request failed unexpectedly")
        finally:
            if not self._is_gone:
                self._end(error)

    def lose(self) -> None:
        self._is_gone = True
        if self.task is not None:
            self.task.cancel()

    async def _answer(self, respond: Respond) -> None:
        async with aclosing(respond(read_request(self._payload))) as responses:
            async for response in responses:
                self._send_data(write_response(response))
                if not (response.final or self._window.has_room):  # a final one makes none
                    await self._window.room()

    def _end(self, error: InferenceError | None) -> None:
        if error is None:
            self._channel.send(InferenceKind.END, self._call)
        else:
            self._channel.send(InferenceKind.REFUSED, self._call, write_error(error))

    def _take(self, frame: Frame) -> None:
        if frame.kind in (InferenceKind.GONE, InferenceKind.ABORT):
            self.lose()
