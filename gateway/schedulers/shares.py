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
NEWEST = 0.1
"""Part of the latest value in a moving mean."""
FEW_TOKENS = 32
"""Below this mean number of output tokens, places become free too fast for one in advance."""


@dataclass(slots=True)
class _Group:
    """Tenants whose counters are compared: those with a weight, or those of weight 0.

    `waiting` has the arrival of the oldest request of each tenant that waits; `last` is the tenant
    whose request was released last.
    """

    counters: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    last: str = ""

    @property
    def least(self) -> float:
        """The least counter of the tenants that wait, else of the one released last."""
        counters = self.counters
        return min([counters[each] for each in self.waiting], default=counters.get(self.last, 0.0))

    def lift(self, tenant: str) -> None:
        """Raise the counter of a tenant that begins to wait: time without requests is not saved."""
        counters = self.counters
        counters[tenant] = max(counters.get(tenant, 0.0), self.least)
        if len(counters) > MOST_COUNTERS:
            kept = nlargest(MOST_COUNTERS // 2, counters, key=counters.__getitem__)
            self.counters = {each: counters[each] for each in (*kept, *self.waiting, tenant)}


class TenantShares:
    """Decides which of the tenants that wait is served next: that with the least counter.

    A counter is the service of a tenant, divided by its weight. A tenant of weight 0 is served only
    while no other one waits. Of equal counters that tenant is served whose oldest request is older.
    `weight` is asked at each change, so that weights may change: the service by which a tenant is
    ahead of the others counts by the new weight, then.
    """

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._weighted, self._unweighted = _Group(), _Group()
        self._weights: dict[str, float] = {}

    def wait(self, tenant: str, since_ns: int) -> None:
        """A tenant waits; its oldest request arrived at that time."""
        group = self._group(tenant)
        if tenant not in group.waiting:
            group.lift(tenant)
        group.waiting[tenant] = since_ns

    def leave(self, tenant: str) -> None:
        """A tenant waits no more."""
        for group in (self._weighted, self._unweighted):
            group.waiting.pop(tenant, None)

    @property
    def next(self) -> str | None:
        """The tenant to be served next; None if none waits."""
        group = self._weighted if self._weighted.waiting else self._unweighted
        waiting, counters = group.waiting, group.counters
        if len(waiting) < 2:
            return next(iter(waiting), None)
        return min(waiting, key=lambda each: (counters[each], waiting[each]))

    def pass_on(self, tenant: str) -> None:
        """A request of a tenant is served at once, while no tenant waits."""
        group = self._group(tenant)
        if tenant != group.last:
            group.lift(tenant)
            group.last = tenant

    def released(self, tenant: str) -> None:
        """A request of a tenant that waited is being served."""
        self._group(tenant).last = tenant

    def charge(self, tenant: str, service: float) -> None:
        """Count service, negative to take back an estimate."""
        counters = self._group(tenant).counters
        counters[tenant] = counters.get(tenant, 0.0) + service / (self._weights[tenant] or 1.0)

    def reweigh(self) -> None:
        """Note that weights may have changed, of tenants that wait, too.

        Each is as much service ahead of the least counter as it was by its weight before.
        """
        weighted, unweighted = self._weighted, self._unweighted
        least = {True: weighted.least, False: unweighted.least}
        moves: list[tuple[str, float, float, int | None]] = []
        for tenant, before in tuple(self._weights.items()):
            weight = self._weights[tenant] = self._weight(tenant)
            old = weighted if before else unweighted
            if weight != before and tenant in old.counters:
                ahead = (old.counters[tenant] - least[bool(before)]) * (before or 1.0)
                moves.append((tenant, weight, ahead, old.waiting.pop(tenant, None)))
        for tenant, weight, ahead, since in moves:
            new = weighted if weight else unweighted
            new.counters[tenant] = least[bool(weight)] + ahead / (weight or 1.0)
            if since is not None:
                new.waiting[tenant] = since

    def _group(self, tenant: str) -> _Group:
        """The group of a tenant by its present weight."""
        weight, before = self._weight(tenant), self._weights.get(tenant)
        if weight != before:
            if before is not None:
                self.reweigh()
            elif len(self._weights) > 2 * MOST_COUNTERS:
                kept = {*self._weighted.counters, *self._unweighted.counters}
                self._weights = {each: self._weights[each] for each in kept & {*self._weights}}
            self._weights[tenant] = weight
        return self._weighted if weight else self._unweighted


class ActiveTenants:
    """The weights of the tenants that had a request in the last minute."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._sum = 0.0

    def share(self, tenant: str, weight: float, now_ns: int) -> float:
        """The part of the whole that a tenant with a request now may have: 0 to 1."""
        _, before = self._seen.get(tenant, (0, 0.0))
        self._seen[tenant] = (now_ns, weight)
        self._seen.move_to_end(tenant)
        self._sum += weight - before
        while (oldest := next(iter(self._seen.values())))[0] < now_ns - ACTIVE_NS:
            self._seen.popitem(last=False)
            self._sum -= oldest[1]
        return weight / max(self._sum, weight) if weight else 0.0


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
        self._ratio, self._outputs, self._row_ms = TokenRatio(), Mean(), Mean(1.0)

    @property
    def slack(self) -> int:
        """The requests that wait at the engine, so that none of its places is ever free."""
        return 2 if self.has_tokens and self._outputs.value < FEW_TOKENS else 1

    def before(self, size_bytes: int, rows: int) -> float:
        """The expected cost of a request without its outputs; with tokens that of its texts."""
        if self.has_tokens:
            return self.prompt_weight * self._ratio.tokens(size_bytes)
        return self._row_ms.value * rows

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
        self._row_ms.add(ms / max(1, rows))
        return ms
