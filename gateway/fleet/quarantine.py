"""Requests that were executing when replicas or instances were lost, known to all routers.

A router sends each one to its replicas, which pass it on to their other routers, and to later ones.
"""

import logging
from functools import partial
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.errors import Code, InferenceError
from gateway.fleet.handshake import FleetKind
from gateway.fleet.offers import Key
from gateway.messages import InferRequest
from gateway.processes.channel import NO_CALL, Channel
from gateway.suspects import ENDS, KEPT_SECS, KEY_BYTES, Suspect, Suspects

log = logging.getLogger("sluice.fleet")

_Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class SharedSuspect(msgspec.Struct, array_like=True, frozen=True):
    """A request by its fingerprint, and a process that ended while it executed it.

    Without a process the request has been answered. `age_secs` is the time since the end, because
    clocks of machines differ. Fields are only added at the end, with defaults.
    """

    key: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    size: _Natural = 0
    process: Annotated[str, Meta(max_length=64)] = ""
    age_secs: Annotated[int, Meta(ge=0, le=int(KEPT_SECS))] = 0


_write = msgspec.msgpack.Encoder().encode
_read = msgspec.msgpack.Decoder(list[SharedSuspect]).decode

_Unsent = list[tuple[Channel | None, msgspec.Raw]]
"""The suspects of a turn, each with the end that it was heard from."""


class SharedSuspects:
    """The suspects of one end of connections: it sends them to the other ends that have joined.

    An end that `relays` passes on what it hears: a replica does. The suspects of a turn of the
    event loop are one frame.
    """

    def __init__(self, *, relays: bool) -> None:
        self.known = Suspects()
        self._relays = relays
        self._channels: set[Channel] = set()
        self._unsent: _Unsent = []

    def join(self, channel: Channel) -> None:
        """Send all suspects to another end, and later ones until it leaves."""
        self._channels.add(channel)
        self._unsent = []  # those that are not sent yet are among all
        every: list[msgspec.Raw] = []
        for suspect in self.known.found.values():
            age_secs = int(self.known.age_secs(suspect))
            if age_secs < KEPT_SECS:
                for process in suspect.ended:
                    found = SharedSuspect(suspect.key, suspect.size, str(process), age_secs)
                    every.append(msgspec.Raw(_write(found)))
        if every:
            channel.send(FleetKind.SUSPECTS, NO_CALL, _write(every))

    def leave(self, channel: Channel) -> None:
        """Send no more to another end."""
        self._channels.discard(channel)

    def hear(self, channel: Channel, payload: bytes) -> None:
        """Take suspects and answers of another end; DecodeError if they are malformed."""
        for each in _read(payload):
            if self._take(each) and self._relays:
                self._send(each, heard_from=channel)

    def add(self, request: InferRequest, load: bytes, process: str) -> Suspect:
        """Mark a request as a suspect at all routers: this process has ended."""
        suspect = self.known.add(request, process, load)
        self._send(SharedSuspect(suspect.key, suspect.size, process))
        return suspect

    def clear(self, request: InferRequest, load: bytes) -> None:
        """Clear a request at all routers: it was answered."""
        suspect = self.known.clear(request, load)
        if suspect is not None:
            self._send(SharedSuspect(suspect.key))

    def _take(self, found: SharedSuspect) -> bool:
        """Note what another end knows; whether it is new."""
        if not found.process:
            return self.known.remove(found.key) is not None
        before = self.known.get(found.key)
        if before is not None and (before.is_refused or found.process in before.ended):
            return False
        self.known.mark(found.key, found.size, found.process, found.age_secs)
        return True

    def _send(self, suspect: SharedSuspect, heard_from: Channel | None = None) -> None:
        unsent = self._unsent
        unsent.append((heard_from, msgspec.Raw(_write(suspect))))
        if len(unsent) == 1:
            for each in self._channels:
                each.before_write(partial(self._flush, each, unsent))

    def _flush(self, channel: Channel, unsent: _Unsent) -> None:
        if unsent is self._unsent:
            self._unsent = []
        every = [written for heard_from, written in unsent if heard_from is not channel]
        if every:
            channel.send(FleetKind.SUSPECTS, NO_CALL, _write(every))


class ModelSuspects:
    """The suspects among the requests of one description of a model at a router.

    Their fingerprints are keyed with the fleet's secret: only its members can compare them.
    """

    def __init__(
        self, shared: SharedSuspects, key: Key, digest: bytes, name: str, secret: bytes
    ) -> None:
        self._shared = shared
        self._name = key[0]
        self._load = blake2b(repr((name, key, digest)).encode(), key=secret[:64]).digest()

    def check(self, request: InferRequest) -> None:
        """Raise INVALID_ARG for a request that was executing when two processes were lost."""
        known = self._shared.known
        suspect = known.find(request, self._load) if known.found else None
        if suspect is not None and suspect.is_refused:
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{self._name}' does not execute this request: {ENDS} replicas or instances "
                "were lost while they executed one with the same inputs and parameters; the "
                f"routers of this fleet refuse it for {KEPT_SECS / 60:g} minutes",
            )

    def executed(self, request: InferRequest) -> None:
        """Clear a request of suspicion: its replica has answered it, without an error."""
        if self._shared.known.found:
            self._shared.clear(request, self._load)

    def add(self, request: InferRequest, process: str) -> bool:
        """Mark a request as a suspect: its process was lost. Whether it is refused from now on."""
        if not self._shared.add(request, self._load, process).is_refused:
            return False
        extra = {"model": request.model, "id": request.id, "secs": KEPT_SECS}
        log.error("request quarantined", extra=extra)
        return True
