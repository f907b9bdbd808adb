"""The replica of a request of one model: that of least cost, or that of its sequence."""

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import NamedTuple

from gateway.config import ModelConfig
from gateway.conversations.copies import ConversationCopy
from gateway.conversations.turn import converses
from gateway.errors import Code, InferenceError
from gateway.fleet.choice import Demand, KnownReplica, ReplicaState, choose
from gateway.fleet.connection import ReplicaConnection
from gateway.fleet.keys import rendezvous
from gateway.fleet.offers import Key
from gateway.messages import InferRequest, SequenceKey, SequenceTag

MOST_SEQUENCES = 65_536
"""Open sequences whose replicas are known; older ones are found by their hashes."""

Connections = Callable[[], Sequence[ReplicaConnection]]


class Pin(NamedTuple):
    """A replica by its id: another process at its address has none of its sequences."""

    replica: ReplicaConnection
    id: str

    @property
    def is_there(self) -> bool:
        """Whether the process at its address is the same."""
        return self.replica.id == self.id


class _Pins:
    """Pins `by_key` of the sequence, the oldest first; `counts` has the number of equal ones."""

    def __init__(self) -> None:
        self.by_key: OrderedDict[SequenceKey, Pin] = OrderedDict()
        self.counts: Counter[Pin] = Counter()

    def get(self, key: SequenceKey) -> Pin | None:
        """The pin of a sequence; None for an unknown one."""
        return self.by_key.get(key)

    def add(self, key: SequenceKey, pin: Pin) -> None:
        """Add the pin of a sequence, the newest one; the oldest one is dropped beyond the limit."""
        self.pop(key)
        self.by_key[key] = pin
        self.counts[pin] += 1
        if len(self.by_key) > MOST_SEQUENCES:
            self.pop(next(iter(self.by_key)))

    def pop(self, key: SequenceKey) -> Pin | None:
        """Drop and return the pin of a sequence; None for an unknown one."""
        pin = self.by_key.pop(key, None)
        if pin is not None:
            self.counts[pin] -= 1
            if not self.counts[pin]:
                del self.counts[pin]
        return pin

    def adopt(self, other: "_Pins", *, moves: bool) -> None:
        """Add those of unknown sequences; if it `moves` them, the other has them no longer."""
        for key, pin in tuple(other.by_key.items()):
            if key not in self.by_key:
                self.add(key, pin)
                if moves:
                    other.pop(key)


class PlacedSequences:
    """The replicas of the `open` sequences of a model, and those of its `copies`."""

    def __init__(self) -> None:
        self.open, self.copies = _Pins(), _Pins()

    def adopt(self, other: "PlacedSequences", *, moves: bool) -> None:
        """Know the sequences of another version that are unknown here.

        It `moves` conversations, as their replicas do. Sequences remain at their version, also for
        requests that name it.
        """
        self.open.adopt(other.open, moves=moves)
        self.copies.adopt(other.copies, moves=moves)


def sequence_of(request: InferRequest) -> SequenceTag | None:
    """The sequence or conversation of a request, which belongs to one replica."""
    found = request.sequence
    return None if found is None or found.correlation_id in (0, "") else found


class ReplicaPlacement:
    """The choice among the connections of a router for the requests of one model.

    Its `sequences` outlast a change of the configuration. If the model `converses`, they are
    conversations.
    """

    def __init__(
        self, key: Key, config: ModelConfig, connections: Connections, random: Random
    ) -> None:
        self._key = key
        self.converses = converses(config)
        self._connections = connections
        self._random = random
        self.sequences = PlacedSequences()

    @property
    def is_ready(self) -> bool:
        """Whether a replica takes new requests."""
        return any(each.serves(self._key) for each in self._connections())

    def choice(
        self, request: InferRequest, demand: Demand, tried: Collection[ReplicaConnection]
    ) -> ReplicaConnection:
        """The replica of a request, none of those tried; InferenceError if none takes it."""
        sequence = sequence_of(request)
        if sequence is not None:
            found = self._pinned(sequence, tried)
        else:
            found = self._cheapest(demand, tried)
        if found is None:
            raise self.nowhere()
        return found

    def holds(self, request: InferRequest) -> bool:
        """Whether a replica has the sequence of a request, or its copy, and takes it."""
        sequence = sequence_of(request)
        return sequence is not None and not sequence.start and self.has(sequence)

    def has(self, sequence: SequenceTag) -> bool:
        """Whether a replica has a sequence, or its copy, and takes its requests."""
        return bool(self._known(sequence.key))

    def pin(self, request: InferRequest) -> Pin | None:
        """The pin of the sequence of a request; None for an unknown one, and without a sequence."""
        sequence = sequence_of(request)
        return None if sequence is None else self.sequences.open.get(sequence.key)

    def unpin(self, request: InferRequest, pin: Pin) -> None:
        """Drop the pin of a sequence, unless it has another one by now."""
        sequence = sequence_of(request)
        if sequence is not None and self.sequences.open.get(sequence.key) is pin:
            self.sequences.open.pop(sequence.key)

    def connection_of(self, known: KnownReplica) -> ReplicaConnection | None:
        """The connection to a replica; None if it is gone."""
        own = (each for each in self._connections() if each.loads.get(self._key) is known)
        return next(own, None)

    def pinned(self) -> Mapping[ReplicaConnection, int]:
        """The number of open sequences at each replica that has some."""
        counts = self.sequences.open.counts
        return {pin.replica: count for pin, count in counts.items() if pin.is_there}

    def keeper(self, copy: ConversationCopy, source: ReplicaConnection) -> ReplicaConnection | None:
        """The replica for the copy of a conversation at `source`: the present one, if it is ready.

        Else that which gets the conversation without `source`; None without another replica.
        """
        pin, found = self.sequences.copies.pop(copy.key), None
        if pin is not None and pin.is_there and pin.replica.serves(self._key):
            found = pin.replica
        if found is None or found is source:
            found = self._first(copy.key, without=source)
        if found is not None and copy.messages:
            self.sequences.copies.add(copy.key, Pin(found, found.id))
        return found

    def targets(self) -> Sequence[KnownReplica]:
        """The replicas that take new requests."""
        return [each.loads[self._key] for each in self._connections() if each.serves(self._key)]

    def _cheapest(
        self, demand: Demand, tried: Collection[ReplicaConnection]
    ) -> ReplicaConnection | None:
        """The replica of least cost that is not among those tried."""
        now = asyncio.get_running_loop().time()
        hosts, key = self._connections(), self._key
        if len(hosts) == 1 and not tried:  # it needs no costs
            [only] = hosts
            known = only.loads.get(key)
            if known is not None and known.accepts(now) and only.serves(key):
                return only
        by_load = {
            known: each
            for each in hosts
            if (known := each.loads.get(key)) is not None and each not in tried
        }
        chosen = choose(demand, by_load, now=now, random=self._random)
        # Nearly always it takes requests: of a thousand replicas only one is asked.
        if chosen is not None and by_load[chosen].serves(self._key):
            return by_load[chosen]
        ready = [known for known, each in by_load.items() if each.serves(self._key)]
        # If all are left out after failures, an attempt is better than a refusal.
        for at in (now, math.inf):
            chosen = choose(demand, ready, now=at, random=self._random)
            if chosen is not None:
                return by_load[chosen]
        return None

    def _pinned(
        self,
        sequence: SequenceTag,
        tried: Collection[ReplicaConnection],
    ) -> ReplicaConnection | None:
        """The replica of a sequence: that of its earlier requests, else that of its copy.

        The hash decides if neither takes requests.
        """
        key = sequence.key
        known = [] if sequence.start else self._known(key)
        chosen = next((each for each in known if each not in tried), None)
        if not known:
            chosen = self._first(key)
        if chosen is None or chosen in tried:
            return None
        if sequence.end:
            self.sequences.open.pop(key)
        else:
            self.sequences.open.add(key, Pin(chosen, chosen.id))
        return chosen

    def _known(self, key: SequenceKey) -> list[ReplicaConnection]:
        """The replica that has a sequence, and that of its copy, as far as they take requests."""
        own, copied = self.sequences.open.get(key), self.sequences.copies.get(key)
        found = []
        if own is not None and own.is_there and own.replica.continues(self._key):
            found.append(own.replica)
        if copied is not None and copied.is_there and copied.replica.serves(self._key):
            found.append(copied.replica)
        return found

    def _first(
        self, key: SequenceKey, without: ReplicaConnection | None = None
    ) -> ReplicaConnection | None:
        """The ready replica that the hash of a sequence chooses."""
        ready = [each for each in self._connections() if each.serves(self._key)]
        by_id = {each.id: each for each in ready if each is not without}
        pin = repr((self._key, key)).encode()
        return next((by_id[each] for each in rendezvous(pin, by_id)), None)

    def nowhere(self) -> InferenceError:
        """The error of a request that no replica takes."""
        name, version = self._key
        states = ", ".join(dict.fromkeys(map(self._trouble, self._connections())))
        return InferenceError(
            Code.UNAVAILABLE,
            f"model '{name}' version {version} has no replica that takes requests ({states}); "
            "retry shortly",
        )

    def _trouble(self, replica: ReplicaConnection) -> str:
        if replica.state is None or not replica.has_both:
            return "it is not connected"  # the reason is in the log, with the address
        if replica.state is not ReplicaState.READY:
            return f"it is {replica.state}"
        offer = replica.models.get(self._key)
        if offer is None:
            return "it does not host the model"
        if replica.serves(self._key):
            return f"it has {offer.most_in_flight} requests in flight, the most it accepts"
        return offer.trouble or "it has not answered for some seconds"
