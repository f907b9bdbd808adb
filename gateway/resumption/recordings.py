"""The recordings of a server, by token and by idempotency key, within a number of bytes."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from gateway.errors import Code, InferenceError, exiting
from gateway.messages import NO_PARAMETERS
from gateway.observability.statistics import RecordingsReading
from gateway.policy.caller import Caller, tenant_of
from gateway.resumption.reader import EventId, RecordingReader
from gateway.resumption.recording import Key, KeyReused, RecordedRequest, Recording
from gateway.settings import ResumptionSettings
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.resumption")

TOKEN_BYTES = 24
RECORDING_BYTES = 4096
"""The size of a recording without its responses and the id of its request."""
BYTES_PER_CHARACTER = 4


class Elsewhere(Protocol):
    """The recordings of the other routers of a fleet; tokens of this one begin with `prefix`."""

    prefix: str

    async def open(self, recorded: RecordedRequest) -> RecordingReader | None:
        """Have the router that has the key record the request; None if this one has it.

        Raises the errors of `Recordings.open`, and UNAVAILABLE if that router is lost meanwhile.
        """

    async def resume(
        self, event: EventId, place: str, caller: Caller | None
    ) -> RecordingReader | None:
        """Read the stream of another router; None if its router is unknown or gone.

        Raises the errors of `Recordings.resume`.
        """

    def wake_readers(self) -> None:
        """See `Recordings.end_invalid`."""

    async def ended(self) -> None:
        """Wait until no call to another router is under way, and no recording is read."""

    def abandon(self, error: InferenceError) -> None:
        """End reading with an error."""


class Recordings:
    """Finds recordings by token and by the keys of each tenant, and bounds their total size.

    A recording counts as its whole limit until its stream ends, then as the bytes it keeps. Ended
    ones without followers are evicted for new ones, oldest first. INVALID_ARG if the settings have
    no room for one recording.
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
        self.elsewhere: Elsewhere | None = None
        self.limit = settings.buffer_size
        self.grace_secs = settings.grace_secs
        self._total_limit = settings.total_size
        self._booked = 0
        self._by_token: dict[str, Recording] = {}
        self._by_key: dict[tuple[str, str], Recording] = {}
        self._over: dict[Recording, None] = {}
        self._exiting = False
        self._resumed = self._joined = self._expired = 0

    def open(
        self, recorded: RecordedRequest, submit: Callable[[], ResponseStream]
    ) -> RecordingReader:
        """Record the stream that `submit` returns, or join the recording of the same key.

        Synchronous, so of two requests with one key the second joins. A reader that joined is
        `replayed`, and starts with the first response. Raises the errors of `submit`, KeyReused,
        UNAVAILABLE without room or with too many followers, ALREADY_EXISTS if the first response
        was dropped.
        """
        self._refuse_if_exiting()
        joined = None if recorded.key is None else self.join(recorded.key, recorded.request.caller)
        if joined is not None:
            return joined
        self._make_room(_fixed_bytes(recorded))
        return self._record(recorded, submit())

    def join(self, key: Key, caller: Caller | None) -> RecordingReader | None:
        """A reader of the recording of a key, if there is one; raises as `open`."""
        found = self._by_key.get((tenant_of(caller), key.name))
        if found is None:
            return None
        if found.recorded.key != key:
            raise KeyReused
        if found.first > 1:
            raise InferenceError(
                Code.ALREADY_EXISTS,
                "the request with this Idempotency-Key has been made, and the first part of its "
                f"answer is no longer kept: only the last {self.limit} bytes are "
                "(--resumable-buffer-size)",
            )
        reader = RecordingReader(found, 0, caller, replayed=True)
        self._joined += 1
        return reader

    async def open_anywhere(
        self, recorded: RecordedRequest, submit: Callable[[], ResponseStream]
    ) -> RecordingReader:
        """As `open`, by the router that has the key if the model is one of a fleet."""
        key, elsewhere = recorded.key, self.elsewhere
        if key is not None and elsewhere is not None and recorded.model.of_fleet:
            self._refuse_if_exiting()
            if (recorded.tenant, key.name) not in self._by_key:
                reader = await elsewhere.open(recorded)
                if reader is not None:
                    return reader
        return self.open(recorded, submit)

    async def resume_anywhere(
        self, event: EventId | None, place: str, caller: Caller | None = None
    ) -> RecordingReader:
        """As `resume`, also for a stream of another router."""
        elsewhere = self.elsewhere
        if elsewhere is not None and event is not None and event.token not in self._by_token:
            self._refuse_if_exiting()
            reader = await elsewhere.resume(event, place, caller)
            if reader is not None:
                return reader
        return self.resume(event, place, caller)

    def resume(
        self, event: EventId | None, place: str, caller: Caller | None = None
    ) -> RecordingReader:
        """Read a stream after an event, in the place and by the tenant of its request.

        NOT_FOUND, always with the same text, if there is no such stream; see `Recording.check`
        and `Recording.follow` for other errors.
        """
        self._refuse_if_exiting()
        found = self._by_token.get(event.token) if event is not None else None
        known = None if found is None else (found.recorded.place, found.recorded.tenant)
        if event is None or found is None or known != (place, tenant_of(caller)):
            raise InferenceError(
                Code.NOT_FOUND,
                "there is no such stream to continue here: it has expired, or it was asked for "
                "elsewhere, or it was not resumable",
            )
        reader = RecordingReader(found, event.number, caller)
        self._resumed += 1
        return reader

    def end_invalid(self) -> None:
        """Wake the readers, so that those whose caller is no longer valid end."""
        for recording in tuple(self._by_token.values()):
            recording.wake_followers()
        if self.elsewhere is not None:
            self.elsewhere.wake_readers()

    def drain(self) -> None:
        """Refuse new readers, and drop recordings as soon as they have no follower."""
        self._exiting = True
        self.grace_secs = 0.0
        for recording in tuple(self._by_token.values()):
            if not recording.followed:
                recording.drop()

    async def read_elsewhere(self) -> None:
        """Wait until no recording of another router is read here."""
        if self.elsewhere is not None:
            await self.elsewhere.ended()

    def abandon_elsewhere(self, error: InferenceError) -> None:
        """End reading the recordings of other routers with an error."""
        if self.elsewhere is not None:
            self.elsewhere.abandon(error)

    def reading(self) -> RecordingsReading:
        """The values for metrics."""
        return RecordingsReading(
            recordings=len(self._by_token),
            byte_size=sum(each.byte_size for each in self._by_token.values()),
            resumed=self._resumed,
            joined=self._joined,
            expired=self._expired,
        )

    # Keeper.

    def book(self, change: int) -> None:
        """Add to, or subtract from, the bytes that recordings may take."""
        self._booked += change

    def ended(self, recording: Recording) -> None:
        """Note the end of a stream; a failed request is not joined, so it can be retried."""
        self._over[recording] = None
        if recording.error is not None:
            self._forget_key(recording)

    def forget(self, recording: Recording, *, expired: bool) -> None:
        """Remove a recording that was dropped."""
        if expired:
            self._expired += 1
            log.info("resumable stream expired", extra={"model": recording.recorded.model.name})
        self._booked -= _fixed_bytes(recording.recorded)
        self._over.pop(recording, None)
        self._by_token.pop(recording.token, None)
        self._forget_key(recording)

    def _record(self, recorded: RecordedRequest, stream: ResponseStream) -> RecordingReader:
        # Inputs may be large, and are not needed after the model has them.
        request = replace(recorded.request, inputs=(), parameters=NO_PARAMETERS, trace=None)
        kept = replace(recorded, request=request, model=stream.model or recorded.model)
        prefix = "" if self.elsewhere is None else self.elsewhere.prefix
        token = prefix + secrets.token_urlsafe(TOKEN_BYTES)
        recording = Recording(token, stream, kept, self)
        self._booked += _fixed_bytes(kept)
        self._by_token[recording.token] = recording
        if recorded.key is not None:
            self._by_key[recorded.tenant, recorded.key.name] = recording
        reader = RecordingReader(recording)
        recording.begin()
        return reader

    def _make_room(self, fixed: int) -> None:
        needed = self.limit + fixed
        while self._booked + needed > self._total_limit:
            idle = next((each for each in self._over if not each.followed), None)
            if idle is None:
                raise InferenceError(
                    Code.UNAVAILABLE,
                    f"resumable streams may take {self._total_limit} bytes "
                    f"(--resumable-total-size), {self.limit} each, and all are in use; retry "
                    "later, or ask without 'resumable' and Idempotency-Key",
                )
            idle.drop()

    def _forget_key(self, recording: Recording) -> None:
        recorded = recording.recorded
        if recorded.key is None:
            return
        name = recorded.tenant, recorded.key.name
        if self._by_key.get(name) is recording:
            del self._by_key[name]

    def _refuse_if_exiting(self) -> None:
        if self._exiting:
            raise exiting()


def _fixed_bytes(recorded: RecordedRequest) -> int:
    """The size of a recording without its responses; clients choose the length of ids."""
    return RECORDING_BYTES + BYTES_PER_CHARACTER * len(recorded.request.id)
