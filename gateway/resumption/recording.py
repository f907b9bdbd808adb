"""A stream that outlives its readers: what of it is kept, and who may leave and come back?"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.models.model import Model
from gateway.resumption.idempotency import Key
from gateway.resumption.keeping import kept_bytes, owned
from gateway.stream import ResponseStream

MAX_FOLLOWERS = 256
"""Clients that follow one stream; every response is handed to each of them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that is to be recorded; only in the same place it can be resumed."""

    place: str
    model: Model
    request: InferRequest
    key: Key | None = None


class Follower(Protocol):
    """Who reads a recording: how far, and how to say that there may be more."""

    position: int

    def wake(self) -> None:
        """There may be more to read."""


class Keeper(Protocol):
    """Who keeps recordings. Called in plain steps."""

    limit: int
    """Bytes that a recording may keep."""
    grace_secs: float
    """How long it waits for somebody."""

    def book(self, change: int) -> None:
        """A recording may take so many bytes more, or less, than it might before."""

    def ended(self, recording: "Recording") -> None:
        """Its stream is over; called once, unless `forget` comes first."""

    def forget(self, recording: "Recording", *, expired: bool) -> None:
        """Nobody can come back to it; `expired`: its stream was not over. Called once."""


class Recording:
    """Reads one stream, and keeps what it says, numbered from 1, for followers who come and go.

    What it keeps beyond the limit is dropped, oldest first, once every follower has read it;
    without a follower nothing is. As long as that leaves too much, nothing more is read,
    which holds the model back. A response that is alone larger than the limit is kept only for
    those who read it as it comes. Without a follower for the grace period the stream is left,
    so that the model stops; one that has ended is forgotten.
    """

    def __init__(self, token: str, stream: ResponseStream, asked: Asked, keeper: Keeper) -> None:
        self.token = token
        self.asked = asked
        self.byte_size = 0
        self.last = 0
        self.over = False
        self.error: InferenceError | None = None
        self.stream = stream
        self._keeper = keeper
        self._kept: dict[int, tuple[InferResponse, int]] = {}
        self._too_large = 0
        self._furthest = 0
        self._booked = 0
        self._followers: set[Follower] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def first(self) -> int:
        """The number of the oldest response that is kept; of the next one if none is."""
        return self.last + 1 - len(self._kept)

    @property
    def attended(self) -> bool:
        """Whether anybody follows it."""
        return bool(self._followers)

    def begin(self) -> None:
        """Begin to read; comes once, after the first follower has joined."""
        self._book(self._keeper.limit)
        self.stream.listen(self.fill)

    def check(self, position: int) -> None:
        """Whether all that comes behind a position can be had.

        NOT_FOUND if some of it has been dropped, INVALID_ARG if it has not been reached.
        """
        if position > self.last:
            raise InferenceError(
                Code.INVALID_ARG,
                f"response {position} of this stream has not been sent yet, the newest is "
                f"{self.last}",
            )
        if position + 1 < self.first:
            raise InferenceError(
                Code.NOT_FOUND,
                f"response {position + 1} of this stream is no longer kept, the oldest is "
                f"{self.first}: only the last {self._keeper.limit} bytes of a stream are "
                "(--resumable-buffer-size)",
            )

    def join(self, follower: Follower) -> None:
        """Somebody follows from now on, from a position that has been checked.

        UNAVAILABLE if too many do.
        """
        if len(self._followers) >= MAX_FOLLOWERS:
            raise InferenceError(
                Code.UNAVAILABLE,
                f"{MAX_FOLLOWERS} clients follow this stream, the most that may; retry later",
            )
        self._call_off()
        self._followers.add(follower)

    def part(self, follower: Follower) -> None:
        """Somebody has gone; others, or the model, may have been held back for them."""
        self._followers.discard(follower)
        if not self._followers:
            self._expect_somebody()
        self.fill()

    def after(self, position: int) -> list[InferResponse]:
        """What has come behind a position that somebody follows from."""
        return [self._kept[number][0] for number in range(position + 1, self.last + 1)]

    def fill(self) -> None:
        """Read what there is room for; to be called when there may be more of either."""
        self._trim()
        while not self.over and self.byte_size <= self._keeper.limit:
            try:
                taken = self.stream.take()
            except InferenceError as error:
                self._end(error)
                break
            if taken is None:
                break
            self._keep(taken)
            self._trim()
        self._book(self.byte_size if self.over else self._keeper.limit)
        for follower in tuple(self._followers):
            follower.wake()

    def leave(self) -> None:
        """Give it up at once; what nobody has read was made for nobody."""
        self._call_off()
        expired, unread = not self.over, self._unread()
        self.over = True
        self.stream.cancel()
        self._kept.clear()
        self.byte_size = 0
        self._book(0)
        self._waste(unread)
        self._keeper.forget(self, expired=expired)

    def _keep(self, taken: Sequence[InferResponse]) -> None:
        """Keep responses; none means that the stream is over."""
        for response in taken:
            size = kept_bytes(response)
            self.last += 1
            self.byte_size += size
            if size <= self._keeper.limit:
                response = owned(response)
            else:
                self._too_large = self.last
            self._kept[self.last] = (response, size)
        if not taken:
            self._end(None)

    def _end(self, error: InferenceError | None) -> None:
        self.over, self.error = True, error
        self._keeper.ended(self)
        if not self._followers:
            self._expect_somebody()

    def _trim(self) -> None:
        """Drop what need not be kept."""
        positions = [follower.position for follower in self._followers]
        self._furthest = max(self._furthest, *positions, 0)
        droppable = min(positions, default=self._too_large)
        while self.byte_size > self._keeper.limit and self._kept and self.first <= droppable:
            number = self.first
            response, size = self._kept.pop(number)
            self.byte_size -= size
            if number > self._furthest:
                self._waste([response])

    def _unread(self) -> Sequence[InferResponse]:
        """What has come, and nobody has taken."""
        kept = self.after(max(self._furthest, self.first - 1))
        try:
            return kept if self.over else kept + (self.stream.take() or [])
        except InferenceError:
            return kept

    def _waste(self, unread: Sequence[InferResponse]) -> None:
        tokens = sum(each.usage.completion_tokens for each in unread if each.usage is not None)
        self.asked.model.statistics.waste(tokens)

    def _expect_somebody(self) -> None:
        self._call_off()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._keeper.grace_secs, self.leave)

    def _call_off(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _book(self, wanted: int) -> None:
        change, self._booked = wanted - self._booked, wanted
        if change:
            self._keeper.book(change)
