"""Response streams: the responses to one request, from a backend to one reader."""

import asyncio
import types
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import Any, Self

from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse, StreamRecorder, responses_of_texts, single
from gateway.policy.caller import Caller

DEFAULT_LIMIT = 64
SHARED_LIMIT_BYTES = 1 << 20
"""A stream is also full once its responses hold this much memory of another process."""
CANCELLED = "cancelled"
"""The parameter of the response that ends an interrupted request."""

INTERRUPTED = InferResponse(parameters={CANCELLED: True}, final=True)
"""The last response of an interrupted request. It has only the flag, and is never omitted."""

WriteTexts = Callable[[str, Sequence[bytes]], bool]
"""Writes responses of a text each, of the output of that name, at once; False if it cannot."""

DISCONNECT = InferenceError(Code.CANCELLED, "Request was cancelled")
"""The error in the record of a cancelled request; never raised, since it would keep tracebacks."""


def has_data(response: InferResponse) -> bool:
    """Whether a response carries more than the final flag."""
    return bool(response.outputs) or not response.final or response == INTERRUPTED


@types.coroutine
def _next_turn() -> Generator[None, None, None]:
    """As `asyncio.sleep(0)`, with one frame instead of two."""
    yield


class Interrupted(InferenceError):
    """Raised instead of the only response of an interrupted request.

    `answers` are the responses produced before the interruption.
    """

    def __init__(self, answers: Sequence[InferResponse] = ()) -> None:
        super().__init__(Code.CANCELLED, "Request was cancelled")
        self.answers = answers


class ResponseStream:
    """Bounded queue of the responses to one request; read by one task inside `with`, or a listener.

    Producers call `put`, `fail` and `end`, which never wait; while it is `full`, one that can wait
    awaits `room`. The reader gets an error after the responses before it. Three ways end it early:

    - leaving the `with` block, or `cancel`: the reader disconnects, and `on_cancel` is called;
    - `interrupt`: the producer is cancelled, and the reader gets INTERRUPTED as last response;
    - `stop`: the producer ends the request as it chooses.

    `cancelled` is set by the first two, `stopping` by the third. Once it is `done` no response
    follows: the producer ended it, or the reader disconnected. A stream is the `cancellation` of
    its request: a scheduler uses `on_cancel`, a backend uses `subscribe`. It is the `sink`, too.
    `request_id`, `caller` and `model`, the loaded version, are set for requests of clients.
    `model_at`: see `Sink`. `on_end` is called once it is done, behind its recorder. While nothing
    is unread, `write_texts` gets the texts of `put_texts` first.
    """

    __slots__ = (
        "__weakref__",
        "_abandoned",
        "_error",
        "_held",
        "_limit",
        "_listener",
        "_may_stop",
        "_on_cancel",
        "_reader",
        "_recorder",
        "_responses",
        "_shared_bytes",
        "_subscriber",
        "_taken",
        "_writer",
        "caller",
        "cancelled",
        "done",
        "model",
        "model_at",
        "on_end",
        "request_id",
        "stopping",
        "write_texts",
    )

    def __init__(self, recorder: StreamRecorder | None = None, limit: int = DEFAULT_LIMIT) -> None:
        self.request_id = ""
        self.caller: Caller | None = None
        self.model: Any = None
        self.model_at: float | None = None
        self.cancelled = self.done = self.stopping = False
        self._may_stop = self._abandoned = self._held = self._taken = False
        self._recorder = recorder
        self._limit = limit
        self._responses: list[InferResponse] = []
        self._shared_bytes = 0
        self._error: InferenceError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None
        self.write_texts: WriteTexts | None = None
        self._writer: asyncio.Future[None] | None = None
        self._on_cancel: Callable[[], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self._subscriber: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End reading, as leaving the `with` block does; for a reader without a task."""
        self._listener = self.write_texts = None
        if not self.done or self._writer is not None:
            self.cancel()
        self.cancelled = True

    # For producers.

    @property
    def full(self) -> bool:
        """Whether the unread responses have reached the limit."""
        return len(self._responses) >= self._limit or self._shared_bytes >= SHARED_LIMIT_BYTES

    @property
    def has_room(self) -> bool:
        """Whether it is neither full nor done."""
        return not self.done and (
            len(self._responses) < self._limit and self._shared_bytes < SHARED_LIMIT_BYTES
        )

    def put(self, response: InferResponse) -> bool:
        """Add a response; returns whether the stream is full then.

        Once the stream is done the response is dropped and recorded as wasted.
        """
        if self.done:
            if self._recorder is not None:
                self._recorder.wasted(response)
            return False
        responses = self._responses
        responses.append(response)
        self._shared_bytes += response.shared_bytes
        if self._recorder is not None:
            self._recorder.responded(response)
        if response.final:
            self.done = True  # as `_finish`, without a call
            if self._recorder is not None:
                self._recorder.ended(None)
            if self.on_end is not None:
                self.on_end()
            self._on_cancel = self._subscriber = None
        # As `_wake_reader`, without a call for each token.
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)
        if self._listener is not None:
            self._listener()
        return len(responses) >= self._limit or self._shared_bytes >= SHARED_LIMIT_BYTES

    def put_texts(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> bool:
        """See `Sink.put_texts`."""
        write, unread = self.write_texts, self._responses or self._held or self.done
        if write is None or unread or not write(name, texts):
            return [self.put(each) for each in responses_of_texts(name, texts, tokens)][-1]
        if self._recorder is not None:
            self._recorder.delivered(name, texts, tokens)
        return False

    def fail(self, error: InferenceError) -> None:
        """End the stream with an error; no effect once it is done."""
        if not self.done:
            self._error = error
            self._finish(error)
            self._on_cancel = self._subscriber = None
            self._wake_reader()

    def abandon(self, error: InferenceError) -> None:
        """End the stream with an error, and cancel the producer; no effect once it is done."""
        if not self.done:
            on_cancel = self._on_cancel
            self.fail(error)
            self.release()
            self._wake_writer()
            self._cancel_producer(on_cancel, None)

    def end(self) -> None:
        """End the stream without a further response; no effect once it is done."""
        if not self.done:
            self._finish(None)
            self._on_cancel = self._subscriber = None
            self._wake_reader()

    def hold(self) -> None:
        """Withhold all responses and the end from the reader until `release`."""
        self._held = True

    def release(self) -> None:
        """End `hold`; no effect without it."""
        if self._held:
            self._held = False
            self._wake_reader()

    async def room(self) -> None:
        """Wait until the stream is not full, or done."""
        while self.full and not self.done:
            wake = asyncio.get_running_loop().create_future()
            self.when_room(wake)
            await wake

    def when_room(self, wake: asyncio.Future[None]) -> None:
        """Resolve `wake` once the reader takes responses or disconnects.

        For a producer of several streams. Only the latest future is resolved.
        """
        self._writer = wake

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the reader disconnects; immediately if it already has.

        A later callback replaces an earlier one, and ends the subscription of a backend.
        """
        if self._abandoned:
            callback()
        else:
            self._on_cancel = callback
            self._subscriber = None

    def subscribe(self, callback: Callable[[], None], *, may_stop: bool = False) -> None:
        """See `Cancellation.subscribe`; `on_cancel` is called first."""
        if self.cancelled or (may_stop and self.stopping):
            callback()
        if not self.done:
            self._subscriber = callback
            self._may_stop = may_stop

    # For the reader.

    def cancel(self, error: InferenceError = DISCONNECT) -> None:
        """Disconnect the reader; idempotent, and safe before the first read."""
        if self.cancelled:
            return
        self.cancelled = True
        if self._writer is not None:
            self._wake_writer()
        if self.done:
            return
        self._finish(error)
        self.release()
        self._wake_reader()
        self._cancel_producer(self._on_cancel, self._subscriber)

    def stop(self) -> None:
        """Ask the producer to end early; the reader gets all further responses. Idempotent.

        A request ends with CANCELLED if no backend executes it that can end it early.
        """
        if self.done or self.stopping:
            return
        subscriber = self._subscriber
        if subscriber is None or not self._may_stop:
            self.abandon(InferenceError(Code.CANCELLED, "Request was cancelled"))
            return
        self.stopping = True
        if self._on_cancel is not None:
            self._on_cancel()
        subscriber()

    def interrupt(self) -> bool:
        """Cancel the producer; the reader gets the responses so far, then INTERRUPTED.

        False, without any effect, once the stream is done.
        """
        if self.done:
            return False
        self.cancelled = True
        # The time to this response is not the time to the model's first response.
        self._taken = self._taken or not self._responses
        self._responses.append(INTERRUPTED)
        self._finish(DISCONNECT)
        self.release()
        self._wake_reader()
        self._wake_writer()
        self._cancel_producer(self._on_cancel, self._subscriber)
        return True

    async def batch(self) -> list[InferResponse]:
        """All unread responses; waits for at least one. Empty once the stream has ended."""
        while (taken := self.take()) is None:
            await self._change()
        return taken

    def take(self) -> list[InferResponse] | None:
        """All unread responses, none once the stream has ended; None if a reader has to wait.

        Raises the stream's error after the last response.
        """
        if self._held:
            return None
        if not self._responses:
            if self.done and self._error is not None:
                raise self._error
            return [] if self.done else None
        if not self._taken:
            self._taken = True
            if self._recorder is not None:
                self._recorder.taken()
        taken, self._responses = self._responses, []
        self._shared_bytes = 0
        if self._writer is not None:
            self._wake_writer()
        return taken

    def listen(self, callback: Callable[[], None], write_texts: WriteTexts | None = None) -> None:
        """Call `callback` synchronously whenever there may be something to `take`.

        Immediately if there already is. For a reader without a task, or of several streams.
        """
        self._listener, self.write_texts = callback, write_texts
        if self.done or self._responses:
            callback()

    async def __aiter__(self) -> AsyncIterator[InferResponse]:
        while responses := await self.batch():
            for response in responses:
                yield response

    async def only(self) -> InferResponse:
        """The response of a request that has exactly one.

        Raises its error, INTERNAL if there is not exactly one response, CANCELLED after `cancel`,
        and Interrupted after `interrupt`.
        """
        if not self.done:
            # An execution on the event loop begins and ends in the next turn, before this task.
            await _next_turn()
        answers: list[InferResponse] = []
        while (response := self.take_only(answers)) is None:
            await self._change()
        return response

    def take_only(self, answers: list[InferResponse]) -> InferResponse | None:
        """As `only`; None if a reader has to wait. `answers` keeps the responses between calls."""
        while (taken := self.take()) != []:
            if taken is None:
                return None
            last = taken[-1]
            if last.outputs and last.final and len(taken) == 1 and not (answers or self.cancelled):
                return last  # an answer with outputs has no error
            answers += [answer for answer in taken if answer.outputs or not answer.final]
            if last is INTERRUPTED:
                raise Interrupted(answers)
            if last.final:
                break
        if self.cancelled:
            raise InferenceError(Code.CANCELLED, "Request was cancelled")
        return single(answers)

    async def _change(self) -> None:
        """Wait until there may be something to `take`."""
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def _finish(self, error: InferenceError | None) -> None:
        self.done = True
        if self._recorder is not None:
            self._recorder.ended(error)
        if self.on_end is not None:
            self.on_end()

    def _cancel_producer(
        self, on_cancel: Callable[[], None] | None, subscriber: Callable[[], None] | None
    ) -> None:
        self._abandoned = True
        self._on_cancel = self._subscriber = None
        if on_cancel is not None:
            on_cancel()
        if subscriber is not None:
            subscriber()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self._listener is not None:
            self._listener()

    def _wake_writer(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
