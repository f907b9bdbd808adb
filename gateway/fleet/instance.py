"""The instance of a model that replicas host: each request is sent to one of them."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from random import Random

from gateway.backend import Answer, Begun, Instance, Reader
from gateway.backend_loader import IN_PYTHON
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError, RefusedError
from gateway.fleet.choice import Demand, ReplicaState, choose
from gateway.fleet.connection import ReplicaCall, ReplicaConnection
from gateway.fleet.offers import Key, ModelOffer
from gateway.fleet.prefixes import rendezvous
from gateway.messages import InferRequest, SequenceKey, SequenceTag, Sink

log = logging.getLogger("sluice.fleet")

REPLAY = "replay"
"""The parameter of a model whose requests may be executed twice."""
MOST_SEQUENCES = 65_536
"""Open sequences whose replicas are known; older ones are found by their hashes."""
WITH_EFFECTS = frozenset({"python", "ensemble"})
"""Backends whose executions may have effects besides their responses."""

ANY_REQUEST = Demand()
"""A request of a model without tokens."""

Connections = Callable[[], Sequence[ReplicaConnection]]


class FleetInstance(Instance):
    """One version of a model at replicas; `connections` are all those of the router.

    A request whose replica is lost before its first response is sent to another one, once, unless
    its execution may have had effects.
    """

    concurrency = None
    has_process = True

    def __init__(self, config: ModelConfig, offer: ModelOffer, connections: Connections) -> None:
        self.adapters = offer.adapters
        self.max_model_len = offer.max_model_len or None
        self.key: Key = (offer.name, offer.version)
        self._version = str(offer.version)
        self._connections = connections
        self._is_repeatable = _is_repeatable(config)
        self._random = Random()
        self._open_sequences: OrderedDict[SequenceKey, ReplicaConnection] = OrderedDict()
        self.singles = self

    def accepts(self, request: InferRequest) -> bool:
        """See `SingleExecutions`."""
        return True

    def begin(self, request: InferRequest, reader: Reader) -> Begun:
        """See `SingleExecutions`."""
        routed = RoutedRequest(self, request, reader)
        routed.begin()
        return routed

    @property
    def waits_for(self) -> Iterable[str]:
        """Its model at a replica, which restarts stalled instances itself."""
        return (f"{self.key[0]} at a replica",)

    def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        raise NotImplementedError("`accepts` leaves every request to `begin`")

    def send(
        self, request: InferRequest, tried: list[ReplicaConnection], on_news: Callable[[], None]
    ) -> ReplicaCall:
        """Send a request to a replica that is not among those tried, and add it to them.

        Raises InferenceError if none takes it, or it cannot be encoded.
        """
        replica = self._choice(request, tried)
        if replica is None:
            raise self._nowhere()
        tried.append(replica)
        return replica.call(self.key, replace(request, version=self._version), on_news)

    def may_repeat(self, replica: ReplicaConnection, error: InferenceError, *, lost: bool) -> bool:
        """Whether another replica may get a request without a response."""
        if lost:
            return self._is_repeatable
        # A replica that is about to end refuses requests.
        is_refused = isinstance(error, RefusedError) and error.code is Code.UNAVAILABLE
        return is_refused and replica.state is not ReplicaState.READY

    def lost(self, replica: ReplicaConnection, *, has_begun: bool) -> InferenceError:
        """The error of a request whose replica was lost."""
        effects = "" if self._is_repeatable or has_begun else "; it may have had effects"
        when = "after its first response" if has_begun else "while it executed the request"
        return InferenceError(
            Code.UNAVAILABLE,
            f"model '{self.key[0]}': replica {replica.id} was lost {when}{effects}",
        )

    async def check_ready(self) -> None:
        if not any(each.serves(self.key) for each in self._connections()):
            raise self._nowhere()

    async def close(self) -> None:
        """Nothing is held between requests."""

    def _choice(
        self, request: InferRequest, tried: Collection[ReplicaConnection]
    ) -> ReplicaConnection | None:
        """The replica with the fewest requests; that of its sequence for a request of one."""
        found = [each for each in self._connections() if each.serves(self.key)]
        if request.sequence is not None and request.sequence.correlation_id not in (0, ""):
            return self._pinned(request.sequence, found, tried)
        by_load = {each.loads[self.key]: each for each in found if each not in tried}
        now = asyncio.get_running_loop().time()
        chosen = choose(ANY_REQUEST, by_load, now=now, random=self._random)
        return None if chosen is None else by_load[chosen]

    def _pinned(
        self,
        sequence: SequenceTag,
        found: Collection[ReplicaConnection],
        tried: Collection[ReplicaConnection],
    ) -> ReplicaConnection | None:
        """The replica of a sequence: that of its earlier requests, else the one of its hash."""
        chosen = None if sequence.start else self._open_sequences.get(sequence.key)
        if chosen is None or not chosen.continues(self.key):
            pin = repr((self.key, sequence.key)).encode()
            by_id = {each.id: each for each in found}
            chosen = next((by_id[each] for each in rendezvous(pin, by_id)), None)
        if chosen is None or chosen in tried:
            return None
        self._open_sequences.pop(sequence.key, None)
        if not sequence.end:
            self._open_sequences[sequence.key] = chosen
            if len(self._open_sequences) > MOST_SEQUENCES:
                self._open_sequences.popitem(last=False)
        return chosen

    def _nowhere(self) -> InferenceError:
        name, version = self.key
        states = ", ".join(dict.fromkeys(map(self._trouble, self._connections())))
        return InferenceError(
            Code.UNAVAILABLE,
            f"model '{name}' version {version} has no replica that takes requests ({states}); "
            "retry shortly",
        )

    def _trouble(self, replica: ReplicaConnection) -> str:
        if replica.state is None:
            return "it is not connected"  # the reason is in the log, with the address
        if replica.state is not ReplicaState.READY:
            return f"it is {replica.state}"
        offer = replica.models.get(self.key)
        if offer is None:
            return "it does not host the model"
        if replica.serves(self.key):
            return f"it has {offer.most_in_flight} requests in flight, the most it accepts"
        return offer.trouble or "it has not answered for some seconds"


class RoutedRequest:
    """A request at a replica, and at another one if the first is lost; without a task.

    While the reader of its responses is full, they remain in the call, whose replica then waits.
    """

    def __init__(self, instance: FleetInstance, request: InferRequest, reader: Reader) -> None:
        self._instance = instance
        self._request = request
        self._reader: Reader | None = reader
        self._sink = request.sink
        self._tried: list[ReplicaConnection] = []
        self._call: ReplicaCall | None = None
        self._has_begun = False
        self._waits = False

    def begin(self) -> None:
        """Send the request; an error goes to the reader."""
        try:
            self._send()
        except InferenceError as error:
            self._end(error)

    def _send(self) -> None:
        self._call = self._instance.send(self._request, self._tried, self._look)
        self._look()  # the replica may have been lost meanwhile

    def abandon(self) -> None:
        """See `Begun`."""
        self._end(None)

    def _look(self) -> None:
        """Pass on what has arrived, as far as the reader has room."""
        if self._waits:
            return
        while (call := self._call) is not None:
            if self._sink is not None and self._sink.full:
                self._wait(self._sink)
                return
            try:
                response = call.take()
            except InferenceError as error:
                self._fail(call, error)
                return
            if response is None:
                if call.is_over:
                    self._end(None)
                return
            self._has_begun = True
            if self._reader is not None:
                self._reader.take(response)

    def _wait(self, sink: Sink) -> None:
        """Look again once the sink has room, or is done."""
        self._waits = True
        wake = asyncio.get_running_loop().create_future()
        wake.add_done_callback(self._woken)
        sink.when_room(wake)

    def _woken(self, _: object) -> None:
        self._waits = False
        self._look()

    def _fail(self, call: ReplicaCall, error: InferenceError) -> None:
        """Try another replica, or end with the error."""
        replica, is_lost = self._tried[-1], call.is_lost
        call.leave()
        self._call = None
        found = self._instance.lost(replica, has_begun=self._has_begun) if is_lost else error
        may_repeat = self._instance.may_repeat(replica, error, lost=is_lost)
        if not may_repeat or self._has_begun or len(self._tried) > 1:
            self._end(found)
            return
        try:
            self._send()
        except InferenceError:  # no other replica takes it
            self._end(found)
            return
        extra = {"model": self._request.model, "id": self._request.id, "lost": replica.address}
        log.warning("request repeated", extra=extra)

    def _end(self, error: InferenceError | None) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.leave()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.over(error)


def _is_repeatable(config: ModelConfig) -> bool:
    backend = "ensemble" if config.ensemble_scheduling is not None else config.backend
    has_effects = backend in WITH_EFFECTS or config.runtime == IN_PYTHON
    return not has_effects or config.parameters.get(REPLAY) == "true"
