"""Charges of a fair queue for the service of requests, and the counts of tenants as metrics."""

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from gateway.backend import MetricReading
from gateway.messages import Usage
from gateway.observability.metrics import histogram_samples
from gateway.observability.statistics import SECONDS_BUCKETS, Histogram
from gateway.policy.tenants import Ledger
from gateway.schedulers.service import Service
from gateway.schedulers.shares import Costs, TenantShares

NS_PER_SECOND = 1e9
PROMPT, CACHED, COMPUTE = "prompt", "cached", "compute_ms"
"""Kinds of service, besides OUTPUT and WASTED."""

WAITING, IN_FLIGHT = "gateway_tenant_waiting", "gateway_tenant_in_flight"
SERVICE, WAIT = "gateway_tenant_service_total", "gateway_queue_wait_seconds"
TENANT_METRICS = {
    WAITING: ("gauge", "Requests of a tenant that wait for its share of the model"),
    IN_FLIGHT: ("gauge", "Requests of a tenant that its share counts and that have not ended"),
    SERVICE: ("counter", "Tokens of a tenant, and milliseconds of executions, by kind"),
    WAIT: ("histogram", "Seconds that requests waited for the share of their tenant"),
}


class Granted(Protocol):
    """A number of requests are `left` that pass without a look; see `Passage`."""

    left: int


class Charges:
    """Charges tenants for service. Implements `ServiceReader`.

    The counters of `shares` get its cost, and `totals` its amounts, behind what the `ledger` has.
    `granted` are the passages with requests left, whose service is no tokens.
    """

    def __init__(self, shares: TenantShares, costs: Costs, ledger: Ledger) -> None:
        self.shares, self.costs, self.ledger = shares, costs, ledger
        self.totals = TenantTotals()
        self.granted: list[Granted] = []

    def revoke(self) -> None:
        """Have the next request of each tenant looked at; takes what is noted into account."""
        if self.ledger.events:
            self.ledger.settle()
        if self.granted:
            for each in self.granted:
                each.left = 0
            self.granted.clear()

    def prompted(self, service: Service, usage: Usage) -> None:
        """See `ServiceReader.prompted`; from now on tokens are expected of each request."""
        self.revoke()
        tokens, cached = usage.prompt_tokens, usage.cached_tokens or 0
        self.settle(service, self.costs.prompted(tokens, cached, service.size_bytes))
        self.totals.service[service.label, PROMPT] += tokens - cached
        self.totals.service[service.label, CACHED] += cached

    def made(self, service: Service, kind: str, tokens: int) -> None:
        """See `ServiceReader.made`."""
        self.wrote(service.tenant, service.label, kind, tokens)

    def computed(self, service: Service, ms: float) -> None:
        """See `ServiceReader.computed`."""
        self.ledger.settle()
        self.settle(service, self.costs.computed(ms, service.rows))
        self.totals.service[service.label, COMPUTE] += ms  # type: ignore[assignment]  # no whole one

    def wrote(self, tenant: str, label: str, kind: str, tokens: int) -> None:
        """Charge a tenant with that label for tokens."""
        if self.ledger.events:
            self.ledger.settle()
        self.shares.charge(tenant, self.costs.output_weight * tokens)
        self.totals.service[label, kind] += tokens

    def settle(self, service: Service, cost: float) -> None:
        """Charge the real cost in place of the estimate."""
        self.shares.charge(service.tenant, cost - service.estimate)
        service.estimate = 0.0


class TenantTotals:
    """The service of each tenant, by its label and kind, and the time for which requests wait."""

    def __init__(self) -> None:
        self.service: Counter[tuple[str, str]] = Counter()
        self.waits = Histogram(SECONDS_BUCKETS)

    def families(
        self, labels: Mapping[str, str], waiting: Mapping[str, int], in_flight: Mapping[str, int]
    ) -> list[MetricReading]:
        """The metrics of a model with these labels; requests are counted by label of tenants."""
        found = {
            name: MetricReading(name, text, kind) for name, (kind, text) in TENANT_METRICS.items()
        }
        for name, counts in ((WAITING, waiting), (IN_FLIGHT, in_flight)):
            for tenant in sorted({*counts, *(each for each, _ in self.service)}):
                found[name].add_sample(name, {**labels, "tenant": tenant}, counts.get(tenant, 0))
        for (tenant, kind), amount in sorted(self.service.items()):
            found[SERVICE].add_sample(SERVICE, {**labels, "tenant": tenant, "kind": kind}, amount)
        found[WAIT].samples.extend(histogram_samples(WAIT, labels, self.waits))
        return list(found.values())
