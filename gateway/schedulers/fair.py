"""The fair queue: requests of tenants wait in front of a scheduler, which gets few at a time.

`shares.py` decides which tenant is served next, `service.py` sees what requests cost, which
`charges.py` counts, and `waiting_sequences.py` keeps the requests of a sequence together.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from gateway.backend import Instance, MetricReading
from gateway.config import ModelConfig
from gateway.config.scheduling import DynamicBatching
from gateway.errors import (
    IN_FLIGHT,
    ROOM_SECS,
    Code,
    InferenceError,
    Refusal,
    RefusalReason,
    RetryAdvice,
    RetryLater,
)
from gateway.messages import InferRequest
from gateway.observability.accounts import TenantsInFlight
from gateway.observability.request_record import Record
from gateway.observability.statistics import QUEUE_TIMEOUT, SEQUENCE_TIMEOUT
from gateway.policy.caller import tenant_of
from gateway.policy.tenants import MOST_TIMES, OTHER, Tenants
from gateway.schedulers.charges import NS_PER_SECOND, Charges
from gateway.schedulers.execution import Entry, Execution
from gateway.schedulers.passages import LEAST_IN_FLIGHT, Passage, Passages, Window
from gateway.schedulers.queue import (
    NS_PER_US,
    QueuedRequest,
    QueueRules,
    RequestQueue,
    queue_full,
)
from gateway.schedulers.rate_limiter import Registration
from gateway.schedulers.scheduler import Scheduler, Timer
from gateway.schedulers.service import Service
from gateway.schedulers.shares import Costs, TenantShares
from gateway.schedulers.token_ratio import text_bytes
from gateway.schedulers.waiting_sequences import WaitingSequences
from gateway.stream import ResponseStream

NO_PRIORITY = 1 << 64
"""The level of requests without a priority: behind all priorities, which have 64 bits."""
BATCHES = 2
"""Batches of an instance in the window: one is executed, and one stands ready."""


class FairScheduler(Scheduler):
    """Shares a scheduler among tenants, which wait in front of it. Implements `PlaceOwner`.

    A request is released to the scheduler while those released and not ended have fewer places
    than the instances and some slack. It is ordered by priority within its tenant, and first in,
    first out within a priority. While none of `tenants` has rules, requests pass.

    The requests of a sequence that has not begun wait together. Those of one that has begun are
    released at once: it has a slot for which other sequences may wait. Only its first request has
    a place, since the others take turns in its slot.
    """

    def __init__(
        self,
        inner: Scheduler,
        config: ModelConfig,
        tenants: Tenants,
        costs: Costs,
        in_flight: TenantsInFlight,
    ) -> None:
        self.inner = inner
        self._model = config.name
        self.tenants = tenants
        self.preparation, self.order = inner.preparation, inner.order
        self._sequences = self._add_sequences(inner)
        self._rules = QueueRules(config.dynamic_batching or DynamicBatching())
        self._levels = self._rules.levels
        self._batched = (config.dynamic_batching or config.sequence_batching) is not None
        self._batch = BATCHES * max(1, config.max_batch_size) if self._batched else 1
        self._costs = costs
        self._shares = TenantShares(tenants.weight)
        self._charges = Charges(self._shares, costs, tenants.ledger)
        self._places: dict[Instance, float] = {}
        self._queues: dict[str, RequestQueue] = {}
        self._window = Window(self._queues, of_rows=self._batched)
        self._passages = Passages(self, self._window, self._charges, tenants)
        self._in_flight = in_flight
        self._releasing = False
        self._changes = tenants.changes
        self._timeout = Timer(self._timed_out)

    def _add_sequences(self, inner: Scheduler) -> WaitingSequences | None:
        """Add the sequences that wait here to those by which the scheduler admits requests."""
        if inner.sequences is None:
            return None
        found = self.sequences = inner.sequences = WaitingSequences(inner.sequences)
        return found

    def admit(self, request: InferRequest) -> None:
        queue = self.inner.limited
        if queue is None or not (self.tenants.configured or self._queues):
            self.inner.admit(request)
            return
        queue.check(request)
        level = self._rules.level(self._capped(request).priority)
        limit = self._rules.limit(level)
        if limit and limit <= self._queued(tenant_of(request.caller), level, queue.queued(level)):
            raise queue_full(request)

    def submit(self, entry: Entry) -> None:
        if not (self.tenants.configured or self._queues) or entry.stream.done:
            self.inner.submit(entry)
            return
        self._charges.revoke()
        if self._changes != self.tenants.changes:
            self.notice_changes()
        caller, record = entry.request.caller, entry.record
        tenant = "" if caller is None else caller.tenant  # as `tenant_of`
        if self._levels or entry.request.priority:
            entry.request = self._capped(entry.request)
        entry.arrived_ns = time.monotonic_ns()
        label = tenant if tenant in self.tenants.by_name else OTHER  # as `Tenants.label`
        entry.service = record.reader = service = Service(
            self, self._charges, record, tenant, label
        )
        entry.stream.on_end = service.ended
        if self._batched:
            service.places = service.rows
        if self._costs.has_tokens:
            service.size_bytes = text_bytes(entry.request)
        service.estimate = self._costs.before(service.size_bytes, service.rows)
        if self._sequences is not None:
            first = self._sequences.follow(entry)
            if first is not None:
                service.places = 0
                entry.stream.on_cancel(partial(self._cancelled, first))
                return
            if self._sequences.continues(entry.request):
                service.places = 0
                self._start(entry, service, entry.arrived_ns)
                return
        if not self._queues and self._has_place:
            self._shares.pass_on(tenant, service.estimate)
            record.released_ns = entry.arrived_ns
            self._window.taken += service.places
            service.is_released = True
            self._charges.totals.waits.counts[0] += 1  # as `observe(0)`, without a call
            self.inner.submit(entry)
        else:
            self._wait(entry, tenant)

    def add(self, instance: Instance, registration: Registration | None = None) -> None:
        self._charges.revoke()
        self._places[instance] = self._places_of(instance)
        self._window.room = sum(self._places.values())
        self.inner.add(instance, registration)
        self._release()

    def remove(self, instance: Instance, error: InferenceError | None = None) -> Awaitable[object]:
        self._charges.revoke()
        self._places.pop(instance, None)
        self._window.room = sum(self._places.values())
        return self.inner.remove(instance, error)

    @property
    def executions(self) -> Iterable[Execution]:
        return self.inner.executions

    async def run(self) -> None:
        try:
            await self.inner.run()
        finally:
            self._timeout.clear()
            self._charges.revoke()  # all executions have ended

    # Of the whole model.

    def refusal(self, request: InferRequest, most: int, total: int) -> Refusal | None:
        """The refusal of a tenant that has its share of `most` requests in flight.

        A share is that of the tenants with a request in the last minute. `total` are in flight.
        """
        self._charges.revoke()
        active, tenant = self._passages.active, tenant_of(request.caller)
        now_ns, in_flight = time.perf_counter_ns(), self._in_flight.get(tenant, 0)
        if in_flight < LEAST_IN_FLIGHT and total < most:
            is_noted = now_ns < active.fresh.get(tenant, 0)
            if is_noted and self._changes == self.tenants.changes:
                return None  # as below: any tenant may have so few
        allowed = self._passages.allowed(tenant, most, now_ns)
        if in_flight >= allowed:
            text = (
                f"model '{self._model}' has {in_flight} requests of tenant "
                f"'{tenant}' in flight, its share is {allowed} (its parameter 'max_in_flight' is "
                f"{most}); retry later"
            )
            advice = RetryAdvice(retry_after_secs=ROOM_SECS, limit=IN_FLIGHT)
            return Refusal(RefusalReason.RATE_LIMITED, text, advice)
        if total < MOST_TIMES * most:
            return None
        return RetryLater(
            f"model '{self._model}' has {MOST_TIMES * most} requests in flight, the most it "
            f"accepts of all tenants (its parameter 'max_in_flight' is {most}); retry later"
        )

    def passage(self, tenant: str, requests: Mapping[Record, ResponseStream]) -> Passage | None:
        """A passage of a tenant until rules change; None if its requests need a look each."""
        rules, inner = self.tenants.rules(tenant), self.inner
        if self._levels or inner.sequences or inner.limited or rules.highest_priority > 1:
            return None
        return Passage(self._passages, tenant, self._in_flight, requests)

    @property
    def slack(self) -> int:
        """The requests that it releases beyond the places of the instances."""
        return self._costs.slack

    def waiting(self, tenant: str) -> int:
        """The number of requests of a tenant that wait here."""
        return len(self._queues[tenant]) if tenant in self._queues else 0

    def families(self, labels: Mapping[str, str]) -> list[MetricReading]:
        """The metrics of tenants, with these labels of the model."""
        self.tenants.ledger.settle()
        label = self.tenants.label
        waiting, in_flight = Counter[str](), Counter[str]()
        for tenant, queue in self._queues.items():
            waiting[label(tenant)] += len(queue)
        for tenant, count in self._in_flight.items():
            in_flight[label(tenant)] += count
        return self._charges.totals.families(labels, waiting, in_flight)

    # Places, as `PlaceOwner`.

    def freed(self, service: Service) -> None:
        """See `PlaceOwner.freed`."""
        if service.is_released:
            service.is_released = False
            self._window.taken -= service.places
            self.look()

    def look(self) -> None:
        """See `PlaceOwner.look`."""
        if self._queues:
            self._release()

    def notice_changes(self) -> None:
        """See `PlaceOwner.notice_changes`."""
        if self._changes != self.tenants.changes:
            self._changes = self.tenants.changes
            self._passages.active.fresh.clear()
            self._shares.reweigh()

    def ended(self, service: Service) -> None:
        """See `PlaceOwner.ended`."""
        self.tenants.ledger.settle()
        if service.outputs:
            self._costs.answered(service.outputs)
        if service.is_released:
            record = service.record
            if service.estimate and not (record is not None and record.started_ns):
                self._charges.settle(service, 0.0)
            self.freed(service)

    # Requests that wait.

    def _wait(self, entry: Entry, tenant: str) -> None:
        request = entry.request
        waiting = QueuedRequest(
            entry,
            rows=1,
            arrived_ns=entry.arrived_ns,
            level=self._priority(request),
            deadline_ns=self._deadline_ns(request, entry.arrived_ns),
        )
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = RequestQueue(self._rules)
        queue.push(waiting)
        if self._sequences is not None:
            self._sequences.begin(waiting)
        entry.stream.on_cancel(partial(self._cancelled, waiting))
        if waiting.deadline_ns:
            self._timeout.set(waiting.deadline_ns)
        self._look_at(tenant)

    def _capped(self, request: InferRequest) -> InferRequest:
        """The request with the best priority that its tenant may have, where it asks for better."""
        asked = request.priority
        best = self.tenants.rules(tenant_of(request.caller)).highest_priority
        if self._levels:
            asked, best = self._rules.level(asked), min(best, self._levels)
        return request if not asked or asked >= best else replace(request, priority=best)

    def _priority(self, request: InferRequest) -> int:
        """The level within the tenant; models without levels of their own have one per priority."""
        if self._levels:
            return self._rules.level(request.priority)
        return request.priority or NO_PRIORITY

    def _deadline_ns(self, request: InferRequest, arrived_ns: int) -> int:
        if self._sequences is None:
            level = self._rules.level(request.priority)
            return self._rules.deadline_ns(level, request.timeout_us, arrived_ns)
        return arrived_ns + request.timeout_us * NS_PER_US if request.timeout_us else 0

    def _queued(self, tenant: str, level: int, behind: Iterable[Entry]) -> int:
        """The requests of a tenant and a level that wait here, or in the scheduler."""
        queue = self._queues.get(tenant)
        here = 0
        if queue is not None:
            here = queue.size(level) if self._levels else len(queue)
        return here + sum(tenant_of(each.request.caller) == tenant for each in behind)

    def _look_at(self, tenant: str) -> None:
        """Tell the shares which request of a tenant is the next one, if any."""
        queue = self._queues.get(tenant)
        if queue:
            self._shares.wait(tenant, next(iter(queue)).arrived_ns)
        elif queue is not None:
            del self._queues[tenant]
            self._shares.leave(tenant)

    def _with_others(self, waiting: QueuedRequest) -> Sequence[Entry]:
        """A request that is queued no more, and those that have waited with it."""
        if self._sequences is None:
            return (waiting.entry,)
        return (waiting.entry, *self._sequences.take(waiting))

    # Release.

    @property
    def _has_place(self) -> bool:
        taken, room = self._window.taken, self._window.room
        return taken < room or taken < room + self._costs.slack

    def _places_of(self, instance: Instance) -> float:
        if instance.places is not None:
            return instance.places
        return inf if instance.concurrency is None else instance.concurrency * self._batch

    def _release(self) -> None:
        """Release requests while the window has places."""
        if self._releasing:
            return  # a request ended as it was released: the outer call continues
        self._releasing = True
        self.tenants.ledger.settle()
        self.notice_changes()
        try:
            while self._has_place and (tenant := self._shares.next) is not None:
                queue = self._queues[tenant]
                waiting = next(iter(queue))
                queue.remove((waiting,))
                self._look_at(tenant)
                self._shares.released(tenant)
                now_ns = time.monotonic_ns()
                for entry in self._with_others(waiting):
                    if entry.service is not None and not entry.stream.done:
                        self._start(entry, entry.service, now_ns)
        finally:
            self._releasing = False

    def _start(self, entry: Entry, service: Service, now_ns: int) -> None:
        entry.record.released_ns = now_ns  # of the clock of records, too
        self._shares.charge(service.tenant, service.estimate)
        self._window.taken += service.places
        service.is_released = True
        self._charges.totals.waits.observe((now_ns - entry.arrived_ns) / NS_PER_SECOND)
        self.inner.submit(entry)

    # Requests that leave without an execution.

    def _cancelled(self, waiting: QueuedRequest) -> None:
        if waiting.queued:
            self._queues[tenant_of(waiting.entry.request.caller)].remove((waiting,))
            self._drop(waiting, InferenceError(Code.CANCELLED, "Request was cancelled"))

    def _timed_out(self) -> None:
        text = QUEUE_TIMEOUT if self._sequences is None else SEQUENCE_TIMEOUT
        now_ns = time.monotonic_ns()
        for tenant, queue in tuple(self._queues.items()):
            for waiting in queue.expire(now_ns):
                self._drop(waiting, InferenceError(Code.UNAVAILABLE, text))
            self._look_at(tenant)  # others may have been delayed
        deadlines = [found for each in self._queues.values() if (found := each.nearest_deadline_ns)]
        if deadlines:
            self._timeout.set(min(deadlines))

    def _drop(self, waiting: QueuedRequest, error: InferenceError) -> None:
        entries = self._with_others(waiting)
        self._look_at(tenant_of(waiting.entry.request.caller))
        for entry in entries:
            entry.stream.fail(error)
