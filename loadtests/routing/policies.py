"""Rules that choose a replica: the router's own, and those of others.

The rules of others know the requests and tokens of all replicas at any time, and every prefix that
they have sent: their results are bounds of what their routers reach.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random

from gateway.fleet.choice import (
    SETTLED_SECS,
    Demand,
    KnownReplica,
    Load,
    UnbegunRequest,
    ahead_now,
    choose,
    moves,
)
from gateway.fleet.prefixes import KeyChanges, KeyIndex
from loadtests.routing.engine import Engine, Served
from loadtests.routing.workload import BLOCK_TOKENS, Prompt

COST = "cost"
NEAR_SECS = 0.001
SGLANG_SHARE, SGLANG_ABSOLUTE, SGLANG_RELATIVE = 0.3, 64, 1.5
"""SGLang's `cache_threshold`, `balance_abs_threshold` and `balance_rel_threshold`."""
RAY_SHARE = 0.1
"""`match_rate_threshold` of Ray's prefix router; its `imbalanced_threshold` is infinite."""


class Router:
    """A router with its own loads, calls and index, as `gateway.fleet` has them."""

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self.known: dict[int, KnownReplica] = {}
        self._random = Random(seed)
        self._index = KeyIndex()
        self._calls = 0
        self._sent: dict[int, list[Served]] = {}

    def announce(self, replica: int, load: Load, changes: KeyChanges) -> None:
        """A replica announces its load, and the keys that it gained and lost."""
        known = self.known.get(replica)
        if known is None:
            self.known[replica] = KnownReplica(str(replica), load, distance_secs=NEAR_SECS)
            self._sent[replica] = []
        else:
            known.announce(load)
        self._index.announce(str(replica), changes)

    def choose(self, prompt: Prompt, now: float) -> int:
        """The number of the replica that gets a request."""
        chosen = choose(
            self._demand(prompt, now), self.known.values(), now=now, random=self._random
        )
        if chosen is None:
            return self._random.choice(list(self.known))
        return int(chosen.id)

    def send(self, served: Served, replica: int, now: float) -> None:
        """Count a call until the replica's load includes it."""
        self._calls += 1
        served.router, served.call = self.number, self._calls
        known = self.known[replica]
        served.sent_at, served.ahead = now, known.ahead
        known.send(served.call, known.work(self._demand(served.prompt, now)))
        self._index.expect(known.id, served.prompt.keys, now)
        self._sent[replica] = [each for each in self._sent[replica] if not each.first_at]
        self._sent[replica].append(served)

    def moves(self, now: float) -> Sequence[tuple[Served, int, int]]:
        """The requests without a first token that move, from and to a replica."""
        unbegun, by_call = [], {}
        for number, sent in self._sent.items():
            known = self.known[number]
            for served in [each for each in sent if not each.first_at]:
                ahead = ahead_now(known, served.ahead, now - served.sent_at)
                if ahead * known.unit_secs < SETTLED_SECS:
                    continue
                demand = self._demand(served.prompt, now)
                unbegun.append(UnbegunRequest(served.call, demand, known, ahead))
                by_call[served.call] = served
        unbegun.sort(key=lambda each: each.call)
        return [
            (by_call[each.request.call], int(each.request.replica.id), int(each.to.id))
            for each in moves(unbegun, self.known.values(), now=now)
        ]

    def recalled(self, served: Served, replica: int) -> None:
        """A replica has given a request up."""
        self.known[replica].end(served.call)
        self._sent[replica].remove(served)

    def _demand(self, prompt: Prompt, now: float) -> Demand:
        held = self._index.held(prompt.keys, now)
        return Demand(
            tokens=prompt.tokens,
            held={name: depth * BLOCK_TOKENS for name, depth in held.items()},
        )


class Others:
    """The state of the rules of others: the prefixes that were sent, and a turn."""

    def __init__(self, engines: Sequence[Engine], seed: int) -> None:
        self.engines = engines
        self.random = Random(seed)
        self.turn = 0
        self._sent = KeyIndex()
        self._sizes: Counter[int] = Counter()

    def least(self, sizes: Sequence[int]) -> int:
        """The replica with the least; equal ones at random."""
        least = min(sizes)
        return self.random.choice([number for number, each in enumerate(sizes) if each == least])

    def requests(self) -> list[int]:
        """The requests of each replica."""
        return [each.in_flight for each in self.engines]

    def emptiest(self) -> int:
        """The replica to which the fewest prefixes were sent."""
        return self.least([self._sizes[number] for number in range(len(self.engines))])

    def best(self, prompt: Prompt) -> tuple[Sequence[int], float]:
        """The replicas with the longest prefix, and its share of the prompt."""
        held = self._sent.held(prompt.keys, 0.0)
        longest = max(held.values(), default=0)
        names = [int(name) for name, depth in held.items() if depth == longest]
        return sorted(names), longest * BLOCK_TOKENS / prompt.tokens

    def note(self, prompt: Prompt, replica: int) -> None:
        """Remember the prefixes that a replica gets."""
        held = self._sent.held(prompt.keys, 0.0).get(str(replica), 0)
        self._sizes[replica] += len(prompt.keys) - held
        self._sent.announce(str(replica), KeyChanges(gained=prompt.keys[held:]))


def round_robin(others: Others, prompt: Prompt) -> int:
    """One after the other."""
    others.turn += 1
    return others.turn % len(others.engines)


def fewest_requests(others: Others, prompt: Prompt) -> int:
    """The replica with the fewest requests."""
    return others.least(others.requests())


def two_at_random(others: Others, prompt: Prompt) -> int:
    """The one with fewer requests of two at random: the default of Ray Serve."""
    numbers = others.random.sample(range(len(others.engines)), min(2, len(others.engines)))
    return min(numbers, key=lambda number: others.engines[number].in_flight)


def fewest_tokens(others: Others, prompt: Prompt) -> int:
    """The replica with the fewest tokens to compute, without regard to prefixes."""
    return others.least([each.waiting_tokens for each in others.engines])


def sglang(others: Others, prompt: Prompt) -> int:
    """The best prefix above 30 %, unless the requests are out of balance.

    Of several replicas with that prefix its tree has the first one in the order of a map.
    """
    requests = others.requests()
    most, least = max(requests), min(requests)
    if most - least > SGLANG_ABSOLUTE and most > SGLANG_RELATIVE * least:
        return others.least(requests)
    best, share = others.best(prompt)
    return best[0] if share > SGLANG_SHARE else others.emptiest()


def ray_prefix(others: Others, prompt: Prompt) -> int:
    """The best prefix from 10 %, else the replica with the fewest prefixes.

    Of several replicas with that prefix the one with the fewest requests is chosen.
    """
    best, share = others.best(prompt)
    if share < RAY_SHARE:
        return others.emptiest()
    return min(best, key=lambda number: others.engines[number].in_flight)


RULES: Mapping[str, Callable[[Others, Prompt], int]] = {
    "round-robin": round_robin,
    "two-at-random": two_at_random,
    "fewest-requests": fewest_requests,
    "fewest-tokens": fewest_tokens,
    "sglang": sglang,
    "ray-prefix": ray_prefix,
}
