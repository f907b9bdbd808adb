"""Shares of tenants in one model: weighted Virtual Token Counters, and what a request costs.

Virtual Token Counters are of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024,
arXiv 2401.00588). The time is an argument.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import nlargest

from gateway.schedulers.token_ratio import TokenRatio

MOST_COUNTERS = 4096
"""Counters kept; of more tenants, those with the least service lose theirs."""
ACTIVE_NS = 60_000_000_000
FRESH_NS = ACTIVE_NS // 60
"""A tenant that was seen so recently is not noted again."""
NEWEST = 0.1
"""Part of the latest value in a moving mean."""
UNITS = 1 << 64
"""Counter of one unit of service at weight 1. Counters are whole numbers of any size, so that each
weight counts, however large the counters have become."""
FEW_TOKENS = 32
"""Below this mean number of output tokens, places become free too fast for one in advance."""


@dataclass(slots=True, eq=False)
class _Group:
    """Tenants whose counters are compared: those with a weight, or those of weight 0.

    `waiting` has the arrival of the oldest request of each tenant that waits; `last` is the tenant
    whose request was released last.
    """

    counters: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    last: str = ""

    @property
    def least(self) -> int:
        """The least counter of the tenants that wait, else of the one released last."""
        counters = self.counters
        return min([counters[each] for each in self.waiting], default=counters.get(self.last, 0))

    def lift(self, tenant: str) -> None:
        """Raise the counter of a tenant that begins to wait: time without requests is not saved."""
        counters = self.counters
        counters[tenant] = max(counters.get(tenant, 0), self.least)
        if len(counters) > MOST_COUNTERS:
            kept = nlargest(MOST_COUNTERS // 2, counters, key=counters.__getitem__)
            self.counters = {each: counters[each] for each in (*kept, *self.waiting, tenant)}


class TenantShares:
    """Decides which of the tenants that wait is served next: that with the least counter.

    A counter is the service of a tenant, divided by its weight. A tenant of weight 0 is served only
    while no other one waits. Of equal counters that tenant is served whose oldest request is older.
    Weights are remembered: call `reweigh` whenever they may have changed.
    """

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._weighted, self._unweighted = _Group(), _Group()
        self._known: dict[str, tuple[_Group, float]] = {}

    def wait(self, tenant: str, since_ns: int) -> None:
        """A tenant waits; its oldest request arrived at that time."""
        group = self._group(tenant)
        if tenant not in group.waiting:
            group.lift(tenant)
        group.waiting[tenant] = since_ns

    def leave(self, tenant: str) -> None:
        """A tenant waits no more."""
        self._group(tenant).waiting.pop(tenant, None)

    @property
    def next(self) -> str | None:
        """The tenant to be served next; None if none waits."""
        group = self._weighted if self._weighted.waiting else self._unweighted
        waiting, counters = group.waiting, group.counters
        if len(waiting) < 2:
            return next(iter(waiting), None)
        return min(waiting, key=lambda each: (counters[each], waiting[each]))

    def pass_on(self, tenant: str, service: float = 0.0) -> None:
        """A request of a tenant is served at once, while no tenant waits; count its service."""
        group, units = self._known.get(tenant) or self._know(tenant)
        if tenant != group.last:
            group.lift(tenant)
            group.last = tenant
        group.counters[tenant] = group.counters.get(tenant, 0) + int(service * units)

    def released(self, tenant: str) -> None:
        """A request of a tenant that waited is being served."""
        self._group(tenant).last = tenant

    def charge(self, tenant: str, service: float) -> None:
        """Count service, negative to take back an estimate."""
        group, units = self._known.get(tenant) or self._know(tenant)
        counters = group.counters
        counters[tenant] = counters.get(tenant, 0) + int(service * units)

    def reweigh(self) -> None:
        """Ask for all weights again; counters of those that changed are converted.

        Each tenant is as much service ahead of the least counter as it was by its weight before.
        """
        least = {id(each): each.least for each in (self._weighted, self._unweighted)}
        moves: list[tuple[str, float, int | None]] = []
        for tenant, (group, units) in tuple(self._known.items()):
            if self._know(tenant) != (group, units) and tenant in group.counters:
                ahead = (group.counters[tenant] - least[id(group)]) / units
                moves.append((tenant, ahead, group.waiting.pop(tenant, None)))
        for tenant, ahead, since_ns in moves:
            group, units = self._known[tenant]
            group.counters[tenant] = least[id(group)] + int(ahead * units)
            if since_ns is not None:
                group.waiting[tenant] = since_ns

    def _group(self, tenant: str) -> _Group:
        return (self._known.get(tenant) or self._know(tenant))[0]

    def _know(self, tenant: str) -> tuple[_Group, float]:
        """Ask for the weight of a tenant: its group, and the units of its service."""
        weight = self._weight(tenant)
        found = (self._weighted, UNITS / weight) if weight else (self._unweighted, float(UNITS))
        if tenant not in self._known and len(self._known) >= 2 * MOST_COUNTERS:
            counters = {*self._weighted.counters, *self._unweighted.counters}
            self._known = {name: self._known[name] for name in counters & {*self._known}}
        self._known[tenant] = found
        return found


class ActiveTenants:
    """The weights of the tenants that had a request in the last minute.

    `fresh` has the times until which a tenant need not be noted again, unless weights change.
    """

    def __init__(self) -> None:
        self.fresh: dict[str, int] = {}
        self._seen: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._sum = 0.0

    def share(self, tenant: str, weight: float, now_ns: int) -> float:
        """The part of the whole that a tenant with a request now has: 0 to 1."""
        self.note(tenant, weight, now_ns)
        return weight / max(self._sum, weight) if weight else 0.0

    def possible_share(self, tenant: str, weight: float, now_ns: int) -> float:
        """The share that a tenant would have with a request now: 0 to 1."""
        self._drop(now_ns)
        others = self._sum - self._seen.get(tenant, (0, 0.0))[1]
        return weight / (max(others, 0.0) + weight) if weight else 0.0

    def note(self, tenant: str, weight: float, at_ns: int) -> None:
        """Note that a tenant has a request at a time, no earlier than those noted before."""
        seen_ns, before = self._seen.get(tenant, (0, 0.0))
        if weight == before and at_ns < seen_ns + FRESH_NS:
            return
        self._seen[tenant] = (at_ns, weight)
        self._seen.move_to_end(tenant)
        self.fresh[tenant] = at_ns + FRESH_NS
        self._sum += weight - before
        self._drop(at_ns)

    def _drop(self, now_ns: int) -> None:
        while self._seen and next(iter(self._seen.values()))[0] < now_ns - ACTIVE_NS:
            gone, (_, weight) = self._seen.popitem(last=False)
            self.fresh.pop(gone, None)
            self._sum -= weight


class Mean:
    """A moving mean, which the first value replaces."""

    __slots__ = ("_any", "value")

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self._any = False

    def add(self, value: float) -> None:
        """Take a value."""
        self.value += (value - self.value) * (NEWEST if self._any else 1.0)
        self._any = True


class Costs:
    """The service of requests of one model: weighted tokens, else milliseconds of executions.

    Before a model has answered, each row is expected to cost 1: little of either kind.
    """

    def __init__(self, prompt_weight: float, output_weight: float) -> None:
        self.prompt_weight, self.output_weight = prompt_weight, output_weight
        self.has_tokens = False
        self._ratio, self._outputs, self.row_ms = TokenRatio(), Mean(), Mean(1.0)

    @property
    def slack(self) -> int:
        """The requests that wait at the engine, so that none of its places is ever free."""
        return 2 if self.has_tokens and self._outputs.value < FEW_TOKENS else 1

    def before(self, size_bytes: int, rows: int) -> float:
        """The expected cost of a request without its outputs; with tokens that of its texts."""
        if self.has_tokens:
            return self.prompt_weight * self._ratio.tokens(size_bytes)
        return self.row_ms.value * rows

    def prompted(self, tokens: int, cached: int, size_bytes: int) -> float:
        """The cost of a prompt with that many tokens, of which some were in the engine's cache."""
        self.has_tokens = True
        self._ratio.learn(size_bytes, tokens)
        return self.prompt_weight * max(0, tokens - cached)

    def answered(self, tokens: int) -> None:
        """Note the output tokens of a request that has ended."""
        self._outputs.add(tokens)

    def computed(self, ms: float, rows: int) -> float:
        """The cost of the rows of a request that took that part of an execution."""
        self.row_ms.add(ms / rows if rows > 1 else ms)
        return ms
