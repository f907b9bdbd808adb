"""The responses to one request, on their way from a backend to one reader."""

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse

DEFAULT_LIMIT = 64
SHARED_LIMIT_BYTES = 1 << 20
"""A stream is full, too, once its responses keep so much memory of another process."""
CANCELLED = "cancelled"
"""The parameter of the response that ends a request which was interrupted."""

INTERRUPTED = InferResponse(parameters={CANCELLED: True}, final=True)
"""The last response of a request that was interrupted. Nothing but the flag, yet never left out."""


def has_data(response: InferResponse) -> bool:
    """Whether a response says more than that none will follow."""
    return bool(response.outputs) or not response.final or response == INTERRUPTED


def single(answers: Sequence[InferResponse]) -> InferResponse:
    """The only one of the responses; raises the first error, INTERNAL for another number."""
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    if len(answers) != 1:
        raise InferenceError(Code.INTERNAL, f"expected a single response, got {len(answers)}")
    return answers[0]


class Interrupted(InferenceError):
    """What a request that must have exactly one response says instead, when it was interrupted.

    `answers` are those that it had produced before.
    """

    def __init__(self, answers: Sequence[InferResponse] = ()) -> None:
        super().__init__(Code.CANCELLED, "Request was cancelled")
        self.answers = answers


class StreamRecorder(Protocol):
    """Whoever accounts for a stream. Called in plain steps; must not raise."""

    def responded(self, response: InferResponse) -> None:
        """A response has been produced for a reader that still waits."""

    def taken(self) -> None:
        """The reader has taken the first response."""

    def wasted(self, response: InferResponse) -> None:
        """A response has been produced after the reader had gone."""

    def ended(self, error: InferenceError | None) -> None:
        """The stream is over: complete, failed, or cancelled. Called exactly once."""


class Leavable:
    """What is left by `cancel` at the end of a `with` block, however that ends."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    @abstractmethod
    def cancel(self) -> None:
        """Say that nobody waits any more; idempotent."""


class ResponseStream(Leavable):
    """Bounded mailbox for the answers to one request; read by one task inside `with`.

    Producers call `put`, `fail` and `end`, which never wait; a producer that can wait holds back
    while `full` by awaiting `room`. Leaving the `with` block cancels what is left, and
    `on_cancel` is told at once. An error is raised to the reader after the responses before it.
    `interrupt` stops the producer likewise, while the reader stays. `cancelled` says that one of
    the two has happened. `stop` lets the producer decide how it ends, which `stopping` says.
    """

    __slots__ = (
        "__weakref__",
        "_abandoned",
        "_done",
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
        "_taken",
        "_writer",
        "cancelled",
        "stopping",
    )

    def __init__(self, recorder: StreamRecorder | None = None, limit: int = DEFAULT_LIMIT) -> None:
        self.cancelled = False
        self.stopping = False
        self._may_stop = False
        self._recorder = recorder
        self._limit = limit
        self._responses: deque[InferResponse] = deque()
        self._shared_bytes = 0
        self._error: InferenceError | None = None
        self._done = False
        self._abandoned = False
        self._held = False
        self._taken = False
        self._reader: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._on_cancel: Callable[[], None] | None = None

    # For whoever produces.

    @property
    def done(self) -> bool:
        """Nothing more will come: the producer ended it, or the reader has gone."""
        return self._done

    @property
    def full(self) -> bool:
        """The reader lags behind by the whole limit."""
        return len(self._responses) >= self._limit or self._shared_bytes >= SHARED_LIMIT_BYTES

    def put(self, response: InferResponse) -> None:
        """Hand over a response; dropped, and recorded as wasted, when nobody waits any more."""
        if self._done:
            if self._recorder is not None:
                self._recorder.wasted(response)
            return
        self._responses.append(response)
        self._shared_bytes += response.shared_bytes
        if self._recorder is not None:
            self._recorder.responded(response)
        if response.final:
            self._finish(None)
            self._on_cancel = None
        self._wake_reader()

    def fail(self, error: InferenceError) -> None:
        """End the stream with an error; no effect once it is done."""
        if not self._done:
            self._error = error
            self._finish(error)
            self._on_cancel = None
            self._wake_reader()

    def abandon(self, error: InferenceError) -> None:
        """End the stream from outside: the reader gets the error, the producer is told to stop."""
        if not self._done:
            on_cancel = self._on_cancel
            self.fail(error)
            self.release()
            self._wake_writer()
            self._tell_producer(on_cancel)

    def end(self) -> None:
        """End the stream without a further response; no effect once it is done."""
        if not self._done:
            self._finish(None)
            self._on_cancel = None
            self._wake_reader()

    def hold(self) -> None:
        """Keep everything from the reader, the end too, until `release`."""
        self._held = True

    def release(self) -> None:
        """Let the reader have what was held, and what comes; no effect if nothing was held."""
        if self._held:
            self._held = False
            self._wake_reader()

    async def room(self) -> None:
        """Wait until the reader has caught up or gone."""
        while self.full and not self._done:
            wake = asyncio.get_running_loop().create_future()
            self.when_room(wake)
            await wake

    def when_room(self, wake: asyncio.Future[None]) -> None:
        """Have a future resolved once the reader has taken responses or gone.

        For a producer of many streams, who cannot await each of them; the latest future counts.
        """
        self._writer = wake

    def on_cancel(self, callback: Callable[[], None], *, may_stop: bool = False) -> None:
        """Have `callback` called once the reader has gone; at once if that is so already.

        With `may_stop` it is called as well once the stream is `stopping`.
        """
        if self._abandoned:
            callback()
        else:
            self._on_cancel = callback
            self._may_stop = may_stop

    # For the one who reads.

    def cancel(self) -> None:
        """Say that nobody waits any more; idempotent, and safe before the first read."""
        if self.cancelled:
            return
        self.cancelled = True
        self._wake_writer()
        if self._done:
            return
        self._finish(InferenceError(Code.CANCELLED, "Request was cancelled"))
        self.release()
        self._wake_reader()
        self._tell_producer(self._on_cancel)

    def stop(self) -> None:
        """Ask the producer to end early; the reader stays, and gets what is still produced.

        A request that no instance executes yet ends with CANCELLED. Idempotent.
        """
        if self._done or self.stopping:
            return
        if not self._may_stop or self._on_cancel is None:
            self.abandon(InferenceError(Code.CANCELLED, "Request was cancelled"))
            return
        self.stopping = True
        self._on_cancel()

    def interrupt(self) -> bool:
        """Stop the request as if its reader had gone, and tell the reader so; False if it is over.

        The reader gets all that was produced before, without delay, and then INTERRUPTED.
        """
        if self._done:
            return False
        self.cancelled = True
        # The wait for this response says nothing about the model.
        self._taken = self._taken or not self._responses
        self._responses.append(INTERRUPTED)
        self._finish(InferenceError(Code.CANCELLED, "Request was cancelled"))
        self.release()
        self._wake_reader()
        self._wake_writer()
        self._tell_producer(self._on_cancel)
        return True

    async def batch(self) -> list[InferResponse]:
        """All responses that are there, at least one unless the stream is over (then empty)."""
        while (taken := self.take()) is None:
            await self._change()
        return taken

    def take(self) -> list[InferResponse] | None:
        """All responses that are there, none if the stream is over; None if one has to wait."""
        if self._held:
            return None
        if not self._responses:
            if self._done and self._error is not None:
                raise self._error
            return [] if self._done else None
        if not self._taken:
            self._taken = True
            if self._recorder is not None:
                self._recorder.taken()
        taken = list(self._responses)
        self._responses.clear()
        self._shared_bytes = 0
        self._wake_writer()
        return taken

    def listen(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, in a plain step, whenever there may be something to `take`.

        At once if there is already. For a reader of many streams, who cannot await each of them.
        """
        self._listener = callback
        if self._done or self._responses:
            callback()

    async def __aiter__(self) -> AsyncIterator[InferResponse]:
        while responses := await self.batch():
            for response in responses:
                yield response

    async def only(self) -> InferResponse:
        """The one response of a request that has exactly one.

        Raises the error of a response, INTERNAL if it has none or more, CANCELLED once its
        reader has gone, and Interrupted if it was interrupted.
        """
        answers: list[InferResponse] = []
        while (taken := self.take()) != []:
            if taken is None:
                await self._change()
                continue
            answers += [answer for answer in taken if answer.outputs or not answer.final]
            if taken[-1] is INTERRUPTED:
                raise Interrupted(answers)
        if self.cancelled:
            raise InferenceError(Code.CANCELLED, "Request was cancelled")
        return single(answers)

    async def _change(self) -> None:
        """Wait until there may be something to take."""
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def _finish(self, error: InferenceError | None) -> None:
        self._done = True
        if self._recorder is not None:
            self._recorder.ended(error)

    def _tell_producer(self, on_cancel: Callable[[], None] | None) -> None:
        self._abandoned = True
        self._on_cancel = None
        if on_cancel is not None:
            on_cancel()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self._listener is not None:
            self._listener()

    def _wake_writer(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
