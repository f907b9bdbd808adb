"""One who follows a recording: it reads as a stream is read, and leaving it cancels nothing."""

import asyncio
from collections.abc import Iterator, Sequence

from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse
from gateway.resumption.event_ids import EventId
from gateway.resumption.recording import Asked, Recording
from gateway.stream import INTERRUPTED, Interrupted, Leavable, ResponseStream, single


class Reader(Leavable):
    """Reads a recording from a position on; read by one task inside `with`, as a ResponseStream.

    `position` is the number of the last response it has taken. `replayed` says that it has joined
    a request that had been made before. Leaving it leaves the recording to those who come back.
    """

    def __init__(self, recording: Recording, position: int = 0, *, replayed: bool = False) -> None:
        recording.check(position)
        self.position = position
        self.replayed = replayed
        self.recording = recording
        self._begins_behind = position
        self._cancelled = False
        self._waiting: asyncio.Future[None] | None = None
        recording.join(self)

    @property
    def token(self) -> str:
        """What those have to name who want to come back."""
        return self.recording.token

    @property
    def asked(self) -> Asked:
        """What the recording was made for."""
        return self.recording.asked

    @property
    def finished(self) -> bool:
        """Whether it has taken everything, and nothing more will come."""
        return self.recording.over and self.position == self.recording.last

    def cancel(self) -> None:
        """Leave; idempotent, and safe before the first read."""
        if not self._cancelled:
            self._cancelled = True
            self.recording.part(self)
            self.wake()

    async def batch(self) -> list[InferResponse]:
        """All responses that are there, at least one unless the stream is over (then empty)."""
        while (taken := self._take()) is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return taken

    async def only(self) -> InferResponse:
        """The one response of a request that has exactly one; fails as `ResponseStream.only`."""
        answers: list[InferResponse] = []
        while batch := await self.batch():
            answers += [answer for answer in batch if answer.outputs or not answer.final]
            if batch[-1] is INTERRUPTED:
                raise Interrupted(answers)
        return single(answers)

    def numbered(self, batch: Sequence[InferResponse]) -> Iterator[tuple[EventId, InferResponse]]:
        """The responses of the batch taken last, each with its id."""
        first = self.position - len(batch) + 1
        for number, response in enumerate(batch, first):
            yield EventId(self.token, number), response

    def begins_with(self, event: EventId) -> bool:
        """Whether that is the first response that it reads."""
        return event.number == self._begins_behind + 1

    def wake(self) -> None:
        """There may be more to read."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _take(self) -> list[InferResponse] | None:
        if self._cancelled:
            raise InferenceError(Code.CANCELLED, "Request was cancelled")
        taken = self.recording.after(self.position)
        if taken:
            self.position += len(taken)
            self.recording.fill()
            return taken
        if self.recording.over and self.recording.error is not None:
            raise self.recording.error.with_traceback(None)  # others may raise it, too
        return [] if self.recording.over else None


Responses = ResponseStream | Reader
"""The answers to one request, for those who read them."""


def recorded_stream(responses: Responses) -> ResponseStream:
    """The stream that the answers come from."""
    return responses.recording.stream if isinstance(responses, Reader) else responses
