"""Readers of recordings, and the ids of the events they read."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from gateway.errors import Code, InferenceError, no_longer_valid
from gateway.messages import InferResponse, single
from gateway.models.model import Model
from gateway.policy.caller import Caller
from gateway.resumption.recording import FollowedRecording, RecordedRequest, Recording
from gateway.stream import INTERRUPTED, Interrupted, ResponseStream

MAX_DIGITS = 15
"""Digits of an event's number: more than any stream needs, few enough to parse."""


@dataclass(frozen=True, slots=True)
class EventId:
    """A response of a recorded stream: `token.number`, numbers from 1; 0 is before the first."""

    token: str
    number: int

    def __str__(self) -> str:
        return f"{self.token}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> "EventId | None":
        """The id in a text; None if the text is not an id of this form."""
        token, _, number = text.strip().rpartition(".")
        if not (token and number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS):
            return None
        return cls(token, int(number))


class RecordingReader:
    """Reads a recording from a position; used by one task inside `with`, as a ResponseStream.

    `position` is the number of the last response read. Once its `caller` is no longer valid it
    raises, and others of the same recording continue. `replayed`: it joined an earlier request
    with the same idempotency key. At the end of `with` the recording stays, to be resumed.
    """

    def __init__(
        self,
        recording: FollowedRecording,
        position: int = 0,
        caller: Caller | None = None,
        *,
        replayed: bool = False,
    ) -> None:
        recording.check(position)
        self._caller = caller
        self.position = position
        self.replayed = replayed
        self.recording = recording
        self._begins_behind = position
        self._cancelled = False
        self._waiting: asyncio.Future[None] | None = None
        recording.follow(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    @property
    def token(self) -> str:
        """The secret that resumes the stream."""
        return self.recording.token

    @property
    def recorded(self) -> RecordedRequest:
        """The request of the recording."""
        return self.recording.recorded

    @property
    def model(self) -> Model:
        """The version that answers the request."""
        return self.recorded.model

    @property
    def finished(self) -> bool:
        """Whether it has read all responses of a stream that has ended."""
        return self.recording.over and self.position == self.recording.last

    @property
    def model_at(self) -> float | None:
        """That of the stream; a router does not know those of other routers."""
        found = self.recording
        return found.stream.model_at if isinstance(found, Recording) else None

    def cancel(self) -> None:
        """Stop reading; idempotent, and safe before the first read."""
        if not self._cancelled:
            self._cancelled = True
            self.recording.unfollow(self)
            self.wake()

    def interrupt(self) -> bool:
        """Cancel the request for all readers, as `ResponseStream.interrupt`."""
        return self.recording.interrupt()

    async def batch(self) -> list[InferResponse]:
        """All unread responses: at least one, or none at the end of the stream."""
        while (taken := self._take()) is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return taken

    async def only(self) -> InferResponse:
        """The single response of a request; raises as `ResponseStream.only` does."""
        answers: list[InferResponse] = []
        while batch := await self.batch():
            answers += [answer for answer in batch if answer.outputs or not answer.final]
            if batch[-1] is INTERRUPTED:
                raise Interrupted(answers)
        return single(answers)

    def numbered(self, batch: Sequence[InferResponse]) -> Iterator[tuple[EventId, InferResponse]]:
        """The responses of the latest batch, each with its id."""
        first = self.position - len(batch) + 1
        for number, response in enumerate(batch, first):
            yield EventId(self.token, number), response

    def begins_with(self, event: EventId) -> bool:
        """Whether an event is the first that this reader reads."""
        return event.number == self._begins_behind + 1

    def wake(self) -> None:
        """Wake the task that waits in `batch`."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _take(self) -> list[InferResponse] | None:
        if self._cancelled:
            raise InferenceError(Code.CANCELLED, "Request was cancelled")
        if self._caller is not None and not self._caller.valid:
            raise no_longer_valid()
        taken = self.recording.after(self.position)
        if taken:
            self.position += len(taken)
            self.recording.fill()
            return taken
        if self.recording.over and self.recording.error is not None:
            raise self.recording.error.with_traceback(None)  # others may raise it, too
        return [] if self.recording.over else None


Responses = ResponseStream | RecordingReader
"""The responses to one request, from its own stream or from a recording."""
