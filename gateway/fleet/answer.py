"""The answer of a replica to a request of a router."""

import logging
from collections import deque
from collections.abc import Callable

from gateway.errors import InferenceError, unexpected
from gateway.fleet.meter import MeteredPrompt
from gateway.messages import InferResponse
from gateway.processes.channel import Channel, ChannelCall, Frame
from gateway.processes.inference_calls import InferenceKind
from gateway.processes.inference_messages import write_error, write_response
from gateway.processes.text_runs import take_run
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.fleet")


class RoutedAnswer(ChannelCall):
    """The answer to a request of a router: a stream of the data plane, read without a task.

    GONE, ABORT and a disconnect cancel the stream. While the router does not acknowledge what was
    sent, responses remain in the stream, which holds back the model.
    """

    def __init__(self, channel: Channel, call: int) -> None:
        super().__init__(channel, call)
        self._stream: ResponseStream | None = None
        self._taken: deque[InferResponse] = deque()
        self._is_due = False
        self._ended: Callable[[], None] = _nothing
        self._metered: MeteredPrompt | None = None

    def begin(
        self,
        stream: ResponseStream,
        ended: Callable[[], None],
        metered: MeteredPrompt | None = None,
    ) -> None:
        """Send the responses of a stream; `ended` is called after the last one."""
        self._stream, self._ended, self._metered = stream, ended, metered
        self._channel.join(self._call, self)
        stream.listen(self._look_soon)

    def refuse(self, error: InferenceError) -> None:
        """Send the end of a request that was not accepted."""
        self._channel.send(InferenceKind.REFUSED, self._call, write_error(error))

    def hear(self, frame: Frame) -> None:
        super().hear(frame)
        if frame.kind == InferenceKind.TAKEN:
            self._look_soon()

    def lose(self) -> None:
        self._close()

    def _take(self, frame: Frame) -> None:
        if frame.kind in (InferenceKind.GONE, InferenceKind.ABORT):
            self._close()

    def _look_soon(self) -> None:
        """Send the responses of this turn of the event loop at its end, texts in one frame."""
        if not self._is_due:
            self._is_due = True
            self._channel.before_write(self._look)

    def _look(self) -> None:
        """Send the responses that are there, as far as the window has room."""
        self._is_due = False
        while (stream := self._stream) is not None and self._window.has_room:
            try:
                if not self._taken and not self._take_from(stream):
                    return
                if self._metered is not None:
                    self._metered.respond(self._taken[0])
                texts = take_run(self._taken)
                if texts is None:
                    self._send_data(write_response(self._taken.popleft()))
                else:
                    self._send_data(texts, InferenceKind.TEXTS)
            except InferenceError as error:
                self.refuse(error)
                self._close()
            except Exception:
                # Around one request: its model has made a value that no message can have.
                log.exception("response not sent")
                self.refuse(unexpected())
                self._close()

    def _take_from(self, stream: ResponseStream) -> bool:
        """Take the responses that are there; False if there are none now, or no more at all."""
        responses = stream.take()
        if responses is None:
            return False
        self._taken.extend(responses)
        if not responses:
            self._channel.send(InferenceKind.END, self._call)
            self._close()
        return bool(responses)

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._channel.leave(self._call)
            stream.close()
            if self._metered is not None:
                self._metered.end()
            self._ended()


def _nothing() -> None:
    """The end of an answer that has not begun."""
