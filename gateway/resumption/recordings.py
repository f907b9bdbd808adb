"""The recordings of a server: who may come back to which, and how much do they take together?"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace

from gateway.errors import Code, InferenceError
from gateway.messages import NO_PARAMETERS
from gateway.observability.metrics import RecordingsReading
from gateway.resumption.event_ids import EventId
from gateway.resumption.idempotency import Key, KeyReused
from gateway.resumption.reader import Reader
from gateway.resumption.recording import Asked, Recording
from gateway.settings import ResumptionSettings
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.resumption")

TOKEN_BYTES = 24
RECORDING_BYTES = 4096
"""What a recording takes beside the responses it keeps, and the id of its request."""
BYTES_PER_CHARACTER = 4


class Recordings:
    """Finds recordings by token and by idempotency key, and bounds what they take together.

    While its stream goes on a recording counts as its whole limit, then as what it keeps. Those
    that are over, and that nobody follows, make room for new ones, the oldest first. INVALID_ARG
    if the settings leave no room for any.
    """

    def __init__(self, settings: ResumptionSettings | None = None) -> None:
        settings = settings or ResumptionSettings()
        least = settings.buffer_size + RECORDING_BYTES
        if settings.total_size < least:
            raise InferenceError(
                Code.INVALID_ARG,
                f"--resumable-total-size is {settings.total_size}, expected at least what one "
                f"stream may take: {least}, with --resumable-buffer-size {settings.buffer_size}",
            )
        self.limit = settings.buffer_size
        self.grace_secs = settings.grace_secs
        self._total_limit = settings.total_size
        self._booked = 0
        self._by_token: dict[str, Recording] = {}
        self._by_key: dict[str, Recording] = {}
        self._over: dict[Recording, None] = {}
        self._exiting = False
        self._resumed = self._joined = self._expired = 0

    def open(self, asked: Asked, submit: Callable[[], ResponseStream]) -> Reader:
        """Record the stream that `submit` gives; or, if the key is known, join the one it has.

        A plain call: of two requests with one key the second joins. A reader that has joined is
        `replayed`, and begins with the first response. Raises what `submit` raises, KeyReused,
        UNAVAILABLE if there is no room or too many follow, ALREADY_EXISTS if the first response is
        no longer kept.
        """
        self._refuse_if_exiting()
        joined = None if asked.key is None else self._join(asked.key)
        if joined is not None:
            return joined
        self._make_room(_beside(asked))
        return self._record(asked, submit())

    def resume(self, event: EventId | None, place: str) -> Reader:
        """Go on behind an event, in the place where the stream was asked for.

        NOT_FOUND, always with one text, if there is no such stream there; see `Recording.check`
        and `Recording.join`.
        """
        self._refuse_if_exiting()
        found = self._by_token.get(event.token) if event is not None else None
        if event is None or found is None or found.asked.place != place:
            raise InferenceError(
                Code.NOT_FOUND,
                "there is no such stream to go on with here: it has expired, or it was asked for "
                "elsewhere, or it was not resumable",
            )
        reader = Reader(found, event.number)
        self._resumed += 1
        return reader

    def drain(self) -> None:
        """Take nobody any more; what nobody follows, or will follow no longer, is left at once."""
        self._exiting = True
        self.grace_secs = 0.0
        for recording in tuple(self._by_token.values()):
            if not recording.attended:
                recording.leave()

    def reading(self) -> RecordingsReading:
        """As metrics show it."""
        return RecordingsReading(
            recordings=len(self._by_token),
            byte_size=sum(each.byte_size for each in self._by_token.values()),
            resumed=self._resumed,
            joined=self._joined,
            expired=self._expired,
        )

    # For the recordings.

    def book(self, change: int) -> None:
        """A recording may take so many bytes more, or less, than it might before."""
        self._booked += change

    def ended(self, recording: Recording) -> None:
        """A stream is over; what has failed is not joined but tried again."""
        self._over[recording] = None
        if recording.error is not None:
            self._forget_key(recording)

    def forget(self, recording: Recording, *, expired: bool) -> None:
        """Nobody can come back to it."""
        if expired:
            self._expired += 1
            log.info("nobody came back to a stream", extra={"model": recording.asked.model.name})
        self._booked -= _beside(recording.asked)
        self._over.pop(recording, None)
        self._by_token.pop(recording.token, None)
        self._forget_key(recording)

    def _join(self, key: Key) -> Reader | None:
        found = self._by_key.get(key.name)
        if found is None:
            return None
        if found.asked.key != key:
            raise KeyReused
        if found.first > 1:
            raise InferenceError(
                Code.ALREADY_EXISTS,
                "the request with this Idempotency-Key has been made, and the first part of its "
                f"answer is no longer kept: only the last {self.limit} bytes are "
                "(--resumable-buffer-size)",
            )
        reader = Reader(found, replayed=True)
        self._joined += 1
        return reader

    def _record(self, asked: Asked, stream: ResponseStream) -> Reader:
        # What is kept for long has no use for what the model has been told, which may be large.
        told = replace(asked.request, inputs=(), parameters=NO_PARAMETERS, trace=None)
        kept = replace(asked, request=told)
        recording = Recording(secrets.token_urlsafe(TOKEN_BYTES), stream, kept, self)
        self._booked += _beside(kept)
        self._by_token[recording.token] = recording
        if asked.key is not None:
            self._by_key[asked.key.name] = recording
        reader = Reader(recording)
        recording.begin()
        return reader

    def _make_room(self, beside: int) -> None:
        needed = self.limit + beside
        while self._booked + needed > self._total_limit:
            idle = next((each for each in self._over if not each.attended), None)
            if idle is None:
                raise InferenceError(
                    Code.UNAVAILABLE,
                    f"the streams that can be resumed may take {self._total_limit} bytes "
                    f"(--resumable-total-size), {self.limit} each, and have them; retry later, or "
                    "ask without 'resumable' and Idempotency-Key",
                )
            idle.leave()

    def _forget_key(self, recording: Recording) -> None:
        key = recording.asked.key
        if key is not None and self._by_key.get(key.name) is recording:
            del self._by_key[key.name]

    def _refuse_if_exiting(self) -> None:
        if self._exiting:
            raise InferenceError(Code.UNAVAILABLE, "Server exiting")


def _beside(asked: Asked) -> int:
    """What a recording takes beside the responses; ids are as long as clients want them."""
    return RECORDING_BYTES + BYTES_PER_CHARACTER * len(asked.request.id)
