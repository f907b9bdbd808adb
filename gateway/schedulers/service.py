"""The service of single requests in a fair queue, and the totals of tenants as metrics."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from gateway.backend import MetricReading
from gateway.errors import InferenceError
from gateway.messages import InferResponse, Phases, StreamRecorder, Usage
from gateway.observability.metrics import histogram_samples
from gateway.observability.request_record import Record
from gateway.observability.statistics import SECONDS_BUCKETS, Histogram

NS_PER_MS = 1e6
NS_PER_SECOND = 1e9
PROMPT, CACHED, OUTPUT, WASTED, COMPUTE = "prompt", "cached", "output", "wasted", "compute_ms"
"""Kinds of service."""

WAITING, IN_FLIGHT = "gateway_tenant_waiting", "gateway_tenant_in_flight"
SERVICE, WAIT = "gateway_tenant_service_total", "gateway_queue_wait_seconds"
TENANT_METRICS = {
    WAITING: ("gauge", "Requests of a tenant that wait for its share of the model"),
    IN_FLIGHT: ("gauge", "Requests of a tenant that its share counts and that have not ended"),
    SERVICE: ("counter", "Tokens of a tenant, and milliseconds of executions, by kind"),
    WAIT: ("histogram", "Seconds that requests waited for the share of their tenant"),
}


class ServiceReader(Protocol):
    """Gets the events of requests that are served."""

    def prompted(self, service: "Service", usage: Usage) -> None:
        """The engine has counted the tokens of the prompt."""

    def made(self, service: "Service", kind: str, tokens: int) -> None:
        """The engine has made tokens: OUTPUT, or WASTED ones."""

    def computed(self, service: "Service", ms: float) -> None:
        """An execution of a request without tokens has ended, of which it had that part."""

    def freed(self, service: "Service") -> None:
        """Its instance takes another request before this one ends."""

    def ended(self, service: "Service") -> None:
        """The request has ended."""


class Service:
    """The service of one request; a `StreamRecorder` that passes every event on to `account`.

    It has `places` of the window from its release on. `size_bytes` is the size of its texts,
    `estimate` its expected cost, until the real one is known. `outputs` are its tokens so far; it
    `has_tokens` once any were counted.
    """

    __slots__ = (
        "_reader",
        "account",
        "estimate",
        "has_tokens",
        "outputs",
        "places",
        "record",
        "size_bytes",
        "tenant",
    )

    def __init__(self, reader: ServiceReader, record: Record, tenant: str) -> None:
        self._reader = reader
        self.account: StreamRecorder = record
        self.record = record
        self.tenant = tenant
        self.places = 1
        self.has_tokens = False
        self.estimate = 0.0
        self.size_bytes = self.outputs = 0

    @property
    def rows(self) -> int:
        """The rows of the request."""
        return self.record.batch_size or 1

    # Events of its execution.

    def freed(self) -> None:
        """Its instance takes another request before this one ends."""
        self._reader.freed(self)

    def executed(self, phases: Phases, rows: int) -> None:
        """An execution with that many rows has ended."""
        if not self.has_tokens:
            spent_ns = phases.input_ns + phases.infer_ns + phases.output_ns
            self._reader.computed(self, spent_ns / NS_PER_MS * self.rows / max(rows, self.rows))

    # StreamRecorder.

    def responded(self, response: InferResponse) -> None:
        """Count the tokens of a response."""
        self.account.responded(response)
        usage = response.usage
        if usage is not None:
            self.has_tokens = True
            if usage.prompt_tokens:
                self._reader.prompted(self, usage)
            self._charge()

    def delivered(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> None:
        """As `responded`, for texts that are already written."""
        self.account.delivered(name, texts, tokens)
        self._charge()

    def taken(self) -> None:
        """Pass the event on."""
        self.account.taken()

    def wasted(self, response: InferResponse) -> None:
        """Count tokens without a reader: they took their time."""
        self.account.wasted(response)
        if response.usage is not None:
            self._reader.made(self, WASTED, response.usage.completion_tokens)

    def ended(self, error: InferenceError | None) -> None:
        """Its share of the model is free."""
        self.account.ended(error)
        self._reader.ended(self)

    def _charge(self) -> None:
        """Charge the tokens of the record since the last call."""
        made = self.record.completion_tokens - self.outputs
        if made:
            self.has_tokens = True
            self.outputs += made
            self._reader.made(self, OUTPUT, made)


class TenantsInFlight(Counter[str]):
    """The requests of each tenant that have not ended, wherever they are."""

    def begun(self, tenant: str, ended: Callable[[Record], None]) -> Callable[[Record], None]:
        """Count a request until the returned function is called, which calls `ended`."""
        self[tenant] += 1
        return partial(self._ended, tenant, ended)

    def _ended(self, tenant: str, ended: Callable[[Record], None], record: Record) -> None:
        self[tenant] -= 1
        if not self[tenant]:
            del self[tenant]
        ended(record)


class TenantTotals:
    """The service of each tenant, by its label and kind, and the time for which requests wait."""

    def __init__(self) -> None:
        self._service: Counter[tuple[str, str]] = Counter()
        self._waits = Histogram(SECONDS_BUCKETS)

    def add(self, label: str, kind: str, amount: float) -> None:
        """Count service."""
        self._service[label, kind] += amount  # type: ignore[assignment]  # milliseconds, too

    def waited(self, wait_ns: int) -> None:
        """Count the wait of a request that is released."""
        self._waits.observe(wait_ns / NS_PER_SECOND)

    def families(
        self, labels: Mapping[str, str], waiting: Mapping[str, int], in_flight: Mapping[str, int]
    ) -> list[MetricReading]:
        """The metrics of a model with these labels; requests are counted by label of tenants."""
        found = {
            name: MetricReading(name, text, kind) for name, (kind, text) in TENANT_METRICS.items()
        }
        for name, counts in ((WAITING, waiting), (IN_FLIGHT, in_flight)):
            for tenant in sorted({*counts, *(each for each, _ in self._service)}):
                found[name].add_sample(name, {**labels, "tenant": tenant}, counts.get(tenant, 0))
        for (tenant, kind), amount in sorted(self._service.items()):
            found[SERVICE].add_sample(SERVICE, {**labels, "tenant": tenant, "kind": kind}, amount)
        found[WAIT].samples.extend(histogram_samples(WAIT, labels, self._waits))
        return list(found.values())
