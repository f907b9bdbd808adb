"""The choice of a replica by its cost in seconds, from absolute counts."""

import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import nlargest
from random import Random

SURCHARGE = 1.0
"""The cost of a computed token above its own time: later requests lose that time, and a place in
the cache."""
HARM = 0.05
"""The weight of the time for which a prefill delays the requests that run on the replica."""
KV_LIMIT, KV_SECS = 0.9, 5.0
"""The share of KV blocks from which a replica costs more, and the cost of a share of 1 above it."""
SAME_SECS = 0.001
"""Costs with a smaller difference are equal."""
REFUSAL_SECS = 1.0
"""A replica that had no room for a request gets none for this time."""
GAIN = 1.2
"""A request moves if its cost is more than this many times that of another replica."""
COMPARED = 8
"""Replicas of least work, and as many of the longest prefixes, that a moving request considers."""
SETTLED_SECS = 2.0
"""A request with fewer seconds of tokens before it does not move: it may have begun."""
NODE_SECS, ZONE_SECS, FAR_SECS = 0.0, 0.001, 0.005
"""The distance to a replica on the same node, in the same zone, and beyond."""


class ReplicaState(StrEnum):
    """The state of a replica; a DRAINING one gets pinned requests only."""

    STARTING = "STARTING"
    READY = "READY"
    DRAINING = "DRAINING"


MOST_REQUESTS = 1_000_000
MOST_CALLS = (1 << 32) - 1
MOST_TOKENS = 10**10
LIMITS: Mapping[str, float] = {
    "seen": MOST_CALLS,
    "waiting_tokens": MOST_TOKENS,
    "running": MOST_REQUESTS,
    "queued": MOST_REQUESTS,
    "prefill_rate": 1e8,
    "step_secs": 3600.0,
    "kv_used": 1.0,
    "room": MOST_REQUESTS,
    "ready_in_secs": 86_400.0,
}
"""The highest value of each field of a load; the lowest is 0."""
WHOLE = {"seen", "waiting_tokens", "running", "queued", "room"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load that a replica announces to one router, in absolute counts.

    - `seen`: the latest call of this router that the other fields include; 0 for none
    - `waiting_tokens`: prompt tokens to be computed, without those in the cache
    - `running`, `queued`: requests that generate tokens, or execute; requests that have not begun
    - `prefill_rate`: prompt tokens computed in a second; 0 for a model without tokens
    - `step_secs`: seconds of a step; of a request, for a model without tokens
    - `kv_used`: the share of KV blocks that cannot be evicted
    - `room`: the number of requests that the replica still accepts
    - `ready_in_secs`: the expected time until a STARTING replica is READY

    A value that no replica can have raises ValueError.
    """

    seen: int
    waiting_tokens: int
    running: int
    queued: int
    prefill_rate: float
    step_secs: float
    kv_used: float
    room: int
    state: ReplicaState
    ready_in_secs: float = 0.0

    def __post_init__(self) -> None:
        for name, most in LIMITS.items():
            found = getattr(self, name)
            kinds = (int,) if name in WHOLE else (int, float)
            if type(found) not in kinds or not 0 <= found <= most:
                kind = "a whole number" if name in WHOLE else "a number"
                raise ValueError(
                    f"{name} of a load is {found!r}, expected {kind} from 0 to {most:,g}"
                )
        if not isinstance(self.state, ReplicaState):
            expected = ", ".join(ReplicaState)
            raise ValueError(f"state of a load is {self.state!r}, expected one of {expected}")


@dataclass(frozen=True, slots=True)
class Location:
    """The node and the zone of a process; empty if unknown."""

    node: str = ""
    zone: str = ""

    def secs_to(self, other: "Location") -> float:
        """The cost of the distance to another process."""
        if self.node and self.node == other.node:
            return NODE_SECS
        return ZONE_SECS if self.zone and self.zone == other.zone else FAR_SECS


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The part of a request that matters for its choice.

    `tokens` is 0 for a model without tokens. `held` has the tokens of its prefix by replica, for
    those that have some.
    """

    tokens: int = 0
    held: Mapping[str, int] = field(default_factory=dict)


ANY_REQUEST = Demand()
"""A request of a model without tokens."""


class KnownReplica:
    """A replica as one router knows it: its load, and the calls that have come or gone since.

    `concurrency` is the number of its concurrent executions, for models without tokens. Work is
    counted in tokens or, without tokens, in requests:

    - `ahead`, `unit_secs`: the work before a new request, and the time of one unit
    - `own_secs`, `fixed_secs`: the cost of one unit of the request itself, and of any request
    - `empty_secs`: the cost of a new request without work of its own
    - `room`: the number of requests that the replica accepts now
    - `refused_until`: the end of the time without requests after a refusal for lack of room
    - `left_out_until`: the end of the time without requests after failures
    - `open_calls`: the calls of this router that have not ended

    A replica of a model with tokens that has not measured its rate yet counts requests. Short calls
    end long before the next load: those that have ended cost nothing until then.
    """

    def __init__(
        self, replica_id: str, load: Load, *, distance_secs: float, concurrency: int = 1
    ) -> None:
        self.id = replica_id
        self.distance_secs = distance_secs
        self.concurrency = concurrency
        self.load = load
        self.refused_until = self.left_out_until = -math.inf
        self.open_calls: set[int] = set()
        self._sent: dict[int, None] = {}
        self._unseen: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._done = 0
        self._count()

    def announce(self, load: Load) -> None:
        """Replace the load; calls that it includes count no longer. ValueError: a foreign call."""
        if load.seen in self._sent:
            for number in tuple(self._sent):
                del self._sent[number]
                if number in self._unseen:
                    self._seen[number] = self._unseen.pop(number)
                if number == load.seen:
                    break
        elif load.seen != self.load.seen:
            calls = ", ".join(map(str, [self.load.seen, *self._sent][:4]))
            raise ValueError(f"seen of a load is {load.seen}, expected one of the calls {calls}")
        self.load = load
        self._done = 0
        self._count()

    def resize(self, concurrency: int) -> None:
        """Change the number of concurrent executions."""
        self.concurrency = concurrency
        self._count()

    def send(self, call: int, tokens: int) -> None:
        """Count a call with its tokens to compute, until a load includes it."""
        self.open_calls.add(call)
        self._sent[call] = None
        self._unseen[call] = tokens
        self._count()

    def begin(self, call: int) -> None:
        """Count the tokens of a call with a response no longer, also those in the load.

        A load comes after all responses that were sent before it.
        """
        if not self.load.prefill_rate:
            return
        self._done += self._seen.pop(call, 0)
        if call in self._unseen:
            self._unseen[call] = 0
        self._count()

    def end(self, call: int) -> None:
        """Count an ended or moved call no longer; the next load may name it as seen."""
        self.open_calls.discard(call)
        if call in self._unseen:
            del self._unseen[call]
        elif call in self._seen:
            self._done += self._seen.pop(call)
        else:
            return
        self._count()

    def refuse(self, now: float) -> None:
        """Note that it had no room for a request; it gets no other one for a second."""
        self.refused_until = now + REFUSAL_SECS

    def accepts(self, now: float) -> bool:
        """Whether it has room, without a refusal in the last second or a pause after failures."""
        return self.room > 0 and self.refused_until <= now and self.left_out_until <= now

    def _count(self) -> None:
        """Count anew: sums that add and subtract estimates drift away from the truth."""
        load, added = self.load, len(self._unseen)
        self.room = load.room - added if load.state is ReplicaState.READY else 0
        if not load.prefill_rate:
            ahead = load.queued + added - self._done
            self.ahead = ahead if ahead > 0 else 0  # as `max`, without a call
            self.unit_secs = self.own_secs = load.step_secs / self.concurrency
            self.fixed_secs = self.distance_secs
            self.empty_secs = self.fixed_secs + self.ahead * self.unit_secs
            return
        self.ahead = max(0, load.waiting_tokens + sum(self._unseen.values()) - self._done)
        self.unit_secs = 1 / load.prefill_rate
        self.own_secs = self.unit_secs * (1 + SURCHARGE + HARM * load.running)
        full_secs = KV_SECS * max(0.0, load.kv_used - KV_LIMIT)
        self.fixed_secs = load.step_secs + full_secs + self.distance_secs
        self.empty_secs = self.fixed_secs + self.ahead * self.unit_secs

    def work(self, demand: Demand) -> int:
        """The part of `ahead` that a request is for those after it."""
        if not self.load.prefill_rate:
            return 1
        return max(1, demand.tokens - demand.held.get(self.id, 0))


def cost(replica: KnownReplica, demand: Demand, ahead: int | None = None) -> float:
    """The seconds until the first token of a request, and those that it takes from others.

    `ahead` is the work before it, by default that of a new request. Without tokens they are the
    seconds until its execution ends.
    """
    secs = replica.empty_secs
    if ahead is not None:
        secs = replica.fixed_secs + ahead * replica.unit_secs
    return secs + replica.work(demand) * replica.own_secs


def wait(replica: KnownReplica, demand: Demand) -> float:
    """The expected seconds until the first response of a request that is sent now."""
    step_secs = replica.load.step_secs if replica.load.prefill_rate else 0.0
    return step_secs + (replica.ahead + replica.work(demand)) * replica.unit_secs


def ahead_now(replica: KnownReplica, ahead_then: int, secs: float) -> int:
    """The work before a request that was sent some seconds ago, with `ahead_then` before it.

    Of the work in a load, a part may have arrived later, from other routers.
    """
    if secs >= ahead_then * replica.unit_secs:
        return 0
    return min(replica.ahead, math.ceil(ahead_then - secs / replica.unit_secs))


def accepting(replicas: Iterable[KnownReplica], now: float) -> list[KnownReplica]:
    """The READY replicas that accept requests."""
    return [each for each in replicas if each.accepts(now)]


def choose(
    demand: Demand, replicas: Iterable[KnownReplica], *, now: float, random: Random
) -> KnownReplica | None:
    """The replica of least cost; None if no replica accepts a request.

    Of equal ones that with the fewest open calls of this router, at random: short requests have
    equal costs, and calls of other routers would lead all routers to the same replica.
    """
    costs = [(cost(each, demand), each) for each in replicas if each.accepts(now)]
    if len(costs) < 2:
        return costs[0][1] if costs else None
    limit = min([secs for secs, _ in costs]) + SAME_SECS
    equal = [each for secs, each in costs if secs <= limit]
    fewest = min([len(each.open_calls) for each in equal])
    return random.choice([each for each in equal if len(each.open_calls) == fewest])


@dataclass(frozen=True, slots=True)
class UnbegunRequest:
    """A request that has not begun, and the work before it on its replica (as `ahead`)."""

    call: int
    demand: Demand
    replica: KnownReplica
    ahead: int


@dataclass(frozen=True, slots=True)
class Move:
    """A request that another replica serves sooner."""

    request: UnbegunRequest
    to: KnownReplica


def moves(
    unbegun: Iterable[UnbegunRequest], replicas: Iterable[KnownReplica], *, now: float
) -> Iterator[Move]:
    """The unbegun requests that move, in order of arrival; each counts for those after it.

    Only a request with two seconds of work before it moves, if another replica costs less by the
    factor `GAIN`. The caller may stop at any move. Pinned requests do not move: leave them out.
    """
    targets, removed = _Targets(accepting(replicas, now)), Counter[str]()
    for request in unbegun:
        here, demand = request.replica, request.demand
        ahead = max(0, request.ahead - removed[here.id])
        own = cost(here, demand, ahead)
        if ahead * here.unit_secs < SETTLED_SECS or own <= GAIN * targets.least:
            continue
        others = [
            (cost(each, demand, targets.ahead(each)), each)
            for each in targets.likely(demand)
            if each is not here
        ]
        secs, to = min(others, key=lambda pair: pair[0], default=(math.inf, here))
        if secs * GAIN < own:
            removed[here.id] += here.work(demand)
            targets.add(here, -here.work(demand))
            targets.add(to, to.work(demand))
            targets.take_room(to)
            yield Move(request, to)


class _Targets:
    """The replicas that accept requests, in the order of `empty_secs` with the moves so far."""

    def __init__(self, replicas: Iterable[KnownReplica]) -> None:
        self._replicas = {each.id: each for each in replicas}
        self._added: Counter[str] = Counter()
        self._arrivals: Counter[str] = Counter()
        self._order = sorted(map(self._place, self._replicas.values()))

    @property
    def least(self) -> float:
        """The least cost of a request without work of its own."""
        return self._order[0][0] if self._order else math.inf

    def ahead(self, replica: KnownReplica) -> int:
        """The work before a new request."""
        return replica.ahead + self._added[replica.id]

    def likely(self, demand: Demand) -> list[KnownReplica]:
        """The replicas with the least work, and with the longest prefixes of a request."""
        least = [name for _, name in self._order[:COMPARED]]
        held = nlargest(COMPARED, demand.held, key=demand.held.__getitem__)
        names = dict.fromkeys((*least, *held))
        return [self._replicas[each] for each in names if each in self._replicas]

    def add(self, replica: KnownReplica, work: int) -> None:
        """Count work that moves to a replica, or from it."""
        if replica.id in self._replicas:
            self._order.remove(self._place(replica))
            self._added[replica.id] += work
            insort(self._order, self._place(replica))

    def take_room(self, replica: KnownReplica) -> None:
        """Count a request that moves to a replica."""
        self._arrivals[replica.id] += 1
        if self._arrivals[replica.id] >= replica.room:
            self._order.remove(self._place(replica))
            del self._replicas[replica.id]

    def _place(self, replica: KnownReplica) -> tuple[float, str]:
        return replica.fixed_secs + self.ahead(replica) * replica.unit_secs, replica.id
