"""Recordings of streams, kept for clients that resume, and their idempotency keys."""

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.models.model import Model
from gateway.policy.caller import tenant_of
from gateway.stream import ResponseStream
from gateway.tensor import Buffer, Tensor

MAX_KEY = 255
DIGEST_BYTES = 32
LENGTH_BYTES = 8

RESUMABLE = "resumable"
"""The request parameter that makes a stream resumable; models do not get it."""
MAX_FOLLOWERS = 256
"""Clients that read one stream; every response is copied to each of them."""

RESPONSE_BYTES = 512
TENSOR_BYTES = 256
PARAMETER_BYTES = 128
ELEMENT_BYTES = 40
"""The size of Python's objects, without the data they hold."""


class KeyReused(InferenceError):
    """The key was used for another request; over HTTP the status is 422."""

    def __init__(self) -> None:
        super().__init__(
            Code.INVALID_ARG,
            "this Idempotency-Key has been used for a request to another route or with another "
            "body; use a new key for a new request",
        )


@dataclass(frozen=True, slots=True)
class Key:
    """A client's name for a request, and a cryptographic hash of the request."""

    name: str
    fingerprint: bytes

    @classmethod
    def of(cls, name: str, route: str, parts: Iterable[Buffer]) -> "Key":
        """The key of a request with a body of `parts`.

        INVALID_ARG if the name is empty or longer than MAX_KEY characters (Idempotency-Key HTTP
        header field, draft 06: the server limits its length).
        """
        if not 0 < len(name) <= MAX_KEY:
            raise InferenceError(
                Code.INVALID_ARG,
                f"the Idempotency-Key has {len(name)} characters, expected 1 to {MAX_KEY}",
            )
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for part in (route.encode("utf-8", "surrogateescape"), *parts):
            view = memoryview(part)
            digest.update(view.nbytes.to_bytes(LENGTH_BYTES, "little"))
            digest.update(view)
        return cls(name, digest.digest())


def without_resumable(request: InferRequest) -> tuple[InferRequest, bool]:
    """The request for the model, and whether its stream is to be resumable.

    INVALID_ARG if the parameter is not a boolean.
    """
    if RESUMABLE not in request.parameters:
        return request, False
    parameters = dict(request.parameters)
    wish = parameters.pop(RESUMABLE)
    if not isinstance(wish, bool):
        raise InferenceError(
            Code.INVALID_ARG, f"parameter '{RESUMABLE}' is {wish!r}, expected true or false"
        )
    return replace(request, parameters=parameters), wish


def kept_bytes(response: InferResponse) -> int:
    """The memory of a kept response in bytes, objects included."""
    tensors = sum(TENSOR_BYTES + _data_bytes(each) for each in response.outputs)
    texts = sum(len(each) for each in response.parameters.values() if isinstance(each, str))
    if response.error is not None:
        texts += len(response.error.message)
    return RESPONSE_BYTES + tensors + PARAMETER_BYTES * len(response.parameters) + texts


def owned(response: InferResponse) -> InferResponse:
    """The response with memory of its own.

    Outputs may be views of larger buffers, or of memory that a runtime reuses.
    """
    if all(isinstance(each.data, bytes | tuple) for each in response.outputs):
        return response
    return replace(response, outputs=tuple(map(_owned, response.outputs)))


def _owned(tensor: Tensor) -> Tensor:
    if isinstance(tensor.data, bytes | tuple):
        return tensor
    return replace(tensor, data=bytes(tensor.raw()))


def _data_bytes(tensor: Tensor) -> int:
    if isinstance(tensor.data, tuple):
        return sum(ELEMENT_BYTES + len(each) for each in tensor.data)
    return len(tensor.data)


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request to record; its stream can be resumed in the same place by the same tenant only."""

    place: str
    model: Model
    request: InferRequest
    key: Key | None = None

    @property
    def tenant(self) -> str:
        """The tenant of its caller."""
        return tenant_of(self.request.caller)


class Follower(Protocol):
    """A reader of a recording; `position` is the number of the last response it has read."""

    position: int

    def wake(self) -> None:
        """Called when there may be more to read."""


class FollowedRecording(Protocol):
    """The part of a recording that its readers use; it may be at another server."""

    token: str
    recorded: RecordedRequest
    last: int
    over: bool
    error: InferenceError | None

    def check(self, position: int) -> None:
        """See `Recording`; so it is with the other methods."""

    def follow(self, follower: Follower) -> None:
        """Add a reader."""

    def unfollow(self, follower: Follower) -> None:
        """Remove a reader."""

    def after(self, position: int) -> list[InferResponse]:
        """The responses after the position of a reader."""

    def fill(self) -> None:
        """Called after a reader has read."""

    def interrupt(self) -> bool:
        """Cancel the request, as `ResponseStream.interrupt`."""


class Keeper(Protocol):
    """The owner of recordings. All methods are synchronous."""

    limit: int
    """Bytes that a recording may keep."""
    grace_secs: float
    """Seconds that a recording lives without a follower."""

    def book(self, change: int) -> None:
        """Add to, or subtract from, the bytes that recordings may take."""

    def ended(self, recording: "Recording") -> None:
        """Called once at the end of the stream, unless `forget` was called before."""

    def forget(self, recording: "Recording", *, expired: bool) -> None:
        """Called once when it was dropped; `expired`: its stream had not ended."""


class Recording:
    """Reads one stream, and keeps its responses, numbered from 1, for followers.

    Beyond the limit the oldest responses are dropped once every follower has read them; without a
    follower none is dropped. While the rest exceeds the limit the stream is not read, which blocks
    the model. A response larger than the limit is kept for the present followers only. Without a
    follower for the grace period the recording is dropped, and its stream cancelled.
    """

    def __init__(
        self, token: str, stream: ResponseStream, recorded: RecordedRequest, keeper: Keeper
    ) -> None:
        self.token = token
        self.recorded = recorded
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
    def followed(self) -> bool:
        """Whether it has a follower."""
        return bool(self._followers)

    def begin(self) -> None:
        """Start to read; called once, after the first `follow`."""
        self._book(self._keeper.limit)
        self.stream.listen(self.fill)

    def check(self, position: int) -> None:
        """Raise unless all responses after a position can be read.

        NOT_FOUND if one of them was dropped, INVALID_ARG if the position has not been reached.
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

    def follow(self, follower: Follower) -> None:
        """Add a follower, whose position was checked; UNAVAILABLE if there are too many."""
        if len(self._followers) >= MAX_FOLLOWERS:
            raise InferenceError(
                Code.UNAVAILABLE,
                f"{MAX_FOLLOWERS} clients follow this stream, the most that may; retry later",
            )
        self._stop_timer()
        self._followers.add(follower)

    def unfollow(self, follower: Follower) -> None:
        """Remove a follower; it may have blocked the others, or the model."""
        self._followers.discard(follower)
        if not self._followers:
            self._start_timer()
        self.fill()

    def after(self, position: int) -> list[InferResponse]:
        """The responses after the position of a follower."""
        return [self._kept[number][0] for number in range(position + 1, self.last + 1)]

    def fill(self) -> None:
        """Read while there is room; call it when there may be more room or more responses."""
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
        self.wake_followers()

    def interrupt(self) -> bool:
        """See `ResponseStream.interrupt`."""
        return self.stream.interrupt()

    def wake_followers(self) -> None:
        """Wake every follower: there may be more to read, or one must read no more."""
        for follower in tuple(self._followers):
            follower.wake()

    def drop(self) -> None:
        """Cancel the stream and forget its responses; unread tokens count as wasted."""
        self._stop_timer()
        expired, unread = not self.over, self._unread()
        self.over = True
        self.stream.cancel()
        self._kept.clear()
        self.byte_size = 0
        self._book(0)
        self._waste(unread)
        self._keeper.forget(self, expired=expired)

    def _keep(self, taken: Sequence[InferResponse]) -> None:
        """Keep responses; an empty batch is the end of the stream."""
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
            self._start_timer()

    def _trim(self) -> None:
        """Drop the responses beyond the limit that every follower has read."""
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
        """The responses that no follower has read."""
        kept = self.after(max(self._furthest, self.first - 1))
        try:
            return kept if self.over else kept + (self.stream.take() or [])
        except InferenceError:
            return kept

    def _waste(self, unread: Sequence[InferResponse]) -> None:
        tokens = sum(each.usage.completion_tokens for each in unread if each.usage is not None)
        self.recorded.model.statistics.waste(tokens)

    def _start_timer(self) -> None:
        self._stop_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._keeper.grace_secs, self.drop)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _book(self, wanted: int) -> None:
        change, self._booked = wanted - self._booked, wanted
        if change:
            self._keeper.book(change)
