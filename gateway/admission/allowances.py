"""Requests that are admitted without a look at each limit, while nothing is scarce.

Their events are noted in the ledger of the tenants, and `settle` makes their accounts later, in the
order of the events, as a `Booking` and a `Service` would: the same sums at a third of the cost.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from gateway.admission.booking import Booked, Booking, TenantAccount
from gateway.admission.costs import LATEST, WITHOUT_TOKENS, ModelCosts
from gateway.admission.quotas import COMPUTE_MS, REQUESTS, TOKENS, Bucket
from gateway.errors import InferenceError
from gateway.messages import InferRequest, Usage
from gateway.models.model import Model
from gateway.models.sharing import in_force
from gateway.observability.request_record import NOT_BOOKED, Record
from gateway.policy.tenants import Tenants
from gateway.schedulers.passages import Passage
from gateway.schedulers.service import NS_PER_MS

HOLDS_SECS = 1.0
"""The time for which an allowance holds, as that for which a tenant is noted as active."""
IS_IN_FLIGHT = 1.0
"""Of a request that has not ended when its begin is taken into account."""
MOST_EVENTS = 256
"""Events that are noted at a time: their accounts take less than half a millisecond."""
LEAST_TIMES = 2.0
"""Times the mean compute time that each request may take, else the bucket is too empty."""


class Allowance:
    """The requests of a tenant that begin at one model. Implements `Allowed`.

    While its `passage` has some left, each limit of the tenant has room for these, and for those
    left of its other models. It is for models without tokens, and for one state of the key file.
    A receipt that is kept has it, so it does not keep the model alive.
    """

    __slots__ = (
        "_clock",
        "_events",
        "_ledger",
        "_limits",
        "_most",
        "_of_model",
        "_request_secs",
        "_requests",
        "_tenants",
        "account",
        "bucket",
        "changes",
        "costs",
        "is_limited",
        "note",
        "now",
        "passage",
        "secs",
        "until",
    )

    def __init__(
        self,
        account: TenantAccount,
        model: Model,
        passage: Passage,
        costs: ModelCosts,
        tenants: Tenants,
        clock: Callable[[], float],
    ) -> None:
        self._of_model, self._most = model.allowances, model.most_in_flight
        self.account, self.passage = account, passage
        self.is_limited = account.is_limited  # else neither costs nor requests in flight count here
        self.costs = costs if self.is_limited else ModelCosts(model)
        self.changes, self.until, self.now = tenants.changes, 0.0, 0.0
        self._tenants, self._ledger, self._clock = tenants, tenants.ledger, clock
        self.note, self._events = tenants.ledger.note, tenants.ledger.events
        limits, buckets = account.limits, account.buckets
        self._limits = limits
        self._requests = buckets[REQUESTS] if limits.requests else Bucket()
        self._request_secs = limits.requests.secs(1) if limits.requests else 0.0
        self.bucket = buckets[COMPUTE_MS] if limits.compute_ms else Bucket()
        self.secs = limits.compute_ms.secs(1) if limits.compute_ms else 0.0

    def admits(self, request: InferRequest) -> bool:
        """See `Allowed`."""
        now, passage = self._clock(), self.passage
        if now >= self.until or request.prepaid or self.costs.has_tokens:
            return False
        if self.changes != self._tenants.changes or (passage.left <= 0 and not self._grant(now)):
            return False
        passage.left -= 1
        if not passage.left:  # the accounts are made while no client waits for this request
            asyncio.get_running_loop().call_soon(self._renew)
        if len(self._events) >= MOST_EVENTS:
            self._ledger.settle()
        self.now = now
        bucket = self._requests  # as its `take`, without a call
        bucket.full_at = (bucket.full_at if bucket.full_at > now else now) + self._request_secs
        return True

    def ended(self, record: Record, error: InferenceError | None) -> None:
        """See `LimitsAccount`."""
        passage = self.passage
        if record.reader is not passage:
            if self.is_limited:
                self._end_apart(record, error)
            return
        record.left_at = self._clock()
        self.note(record)
        if record.ended_ns - record.started_ns > self.costs.most_ns:
            self.costs.exceeded(record.ended_ns - record.started_ns)
        if len(self._events) >= MOST_EVENTS:
            self._ledger.settle()
        if passage.window.waiting:
            passage.look_behind(record)

    def wasted(self, usage: Usage) -> None:
        """See `LimitsAccount`."""
        self._apart((0, 0.0, 0.0, 0.0)).wasted(usage)

    def end(self) -> None:
        """See `Allowed`."""
        account = self.account
        account.look()
        account.allowances = [each for each in account.allowances if each is not self]
        self._of_model.pop(account.tenant, None)

    def _end_apart(self, record: Record, error: InferenceError | None) -> None:
        """End a request with a service of its own, which may have tokens, with an account, too."""
        booked_ms, back_at, *_ = record.booked
        record.account = booking = self._apart((0, 0.0, booked_ms, 0.0))
        booking.limits, booking.compute_back_at = self._limits, back_at
        booking.ended(record, error)

    def _apart(self, booked: Booked) -> Booking:
        return Booking(self.account, self.costs, WITHOUT_TOKENS, booked, self._clock, None)

    def take(self, first: Record, rest: Iterator[Record]) -> Record | None:
        """Make the accounts of events in their order, as `Booking` and `Service` would.

        Returns the first event of another account. What the fair queue charges is summed up.
        """
        costs, bucket, secs = self.costs, self.bucket, self.secs
        passage, row_ms = self.passage, self.passage.row_ms
        passed, service, served_ms, other = 0, 0.0, 0.0, None
        for record in chain((first,), rest):
            if record.account is not self:
                other = record
                break
            own = record.batch_size or 1
            if record.booked is NOT_BOOKED:
                now, full_at, booked_ms = record.entered_at, bucket.full_at, costs.compute_ms
                bucket.full_at = back_at = (full_at if full_at > now else now) + booked_ms * secs
                estimate = row_ms.value * own
                record.booked = [booked_ms, back_at, estimate, 0.0]
                if not passed:
                    passage.passes_on(service, record.submitted_ns)
                    service = 0.0
                passed, service = passed + 1, service + estimate
                if not record.ended_ns:  # else its end follows
                    self._enter(record, own)
                continue
            booked_ms, back_at, estimate, is_in_flight = record.booked
            if record.execution is None:
                compute_ms = record.compute_ms(record.ended_ns)
                service -= 0.0 if record.started_ns else estimate
            else:
                spent, rows = record.execution
                spent_ns = spent.input_ns + spent.infer_ns + spent.output_ns
                ms = spent_ns / NS_PER_MS * own / (rows if rows > own else own)
                is_usual = spent is record.phases and rows == (record.execution_rows or own)
                is_usual = is_usual and spent_ns <= record.ended_ns - record.started_ns
                compute_ms = ms if is_usual else record.compute_ms(record.ended_ns)
                row_ms.add(ms / own)
                service, served_ms = service + ms - estimate, served_ms + ms
            unused, now = (booked_ms - compute_ms) * secs, record.left_at
            if unused < 0 or back_at > now:
                bucket.give_back(unused, now, back_at)
            if is_in_flight:
                self._leave(own)
            if record.failure is None:
                costs.compute_ms += LATEST * (compute_ms - costs.compute_ms)
                costs.reports_tokens = False
        passage.charge(service, served_ms, passed)
        return other

    def _enter(self, record: Record, rows: int) -> None:
        """Count a request that has not ended as one in flight."""
        record.booked[3] = IS_IN_FLIGHT
        self.account.in_flight += self.is_limited
        self.passage.entered(rows)

    def _leave(self, rows: int) -> None:
        """Count a request no more that had entered."""
        self.account.in_flight -= self.is_limited
        self.passage.left_by(rows)

    def _renew(self) -> None:
        """Let further requests begin, if this is still the allowance of its model."""
        now, is_used = self._clock(), self._of_model.get(self.account.tenant) is self
        if is_used and now < self.until and self.changes == self._tenants.changes:
            self._grant(now)

    def _grant(self, now: float) -> bool:
        """Look at all limits; whether at least one request may begin."""
        self._ledger.settle()
        passage, account = self.passage, self.account
        passage.left = 0
        count, others = passage.room(self._most), account.left
        most = account.limits.in_flight
        if most is not None:
            count = min(count, most - account.in_flight - others)
        if count <= 0 or not self._has_units(count + others, now):
            return False
        passage.grant(count)
        return True

    def _has_units(self, count: int, now: float) -> bool:
        """Whether the buckets have units for a count of requests; sets what each may take."""
        account, limits, buckets = self.account, self.account.limits, self.account.buckets
        if limits.requests and buckets[REQUESTS].wait_secs(count, limits.requests, now):
            return False
        if limits.tokens and buckets[TOKENS].wait_secs(0, limits.tokens, now):
            return False
        if limits.compute_ms is None:
            return True
        left_ms = buckets[COMPUTE_MS].remaining(limits.compute_ms, now)
        each_ms = left_ms / (count + account.in_flight + 1)
        if each_ms <= LEAST_TIMES * max(each.costs.compute_ms for each in account.allowances):
            return False
        for each in account.allowances:
            each.costs.assume(account, each_ms * NS_PER_MS)
        return True


def allow(
    account: TenantAccount,
    model: Model,
    costs: ModelCosts,
    tenants: Tenants,
    clock: Callable[[], float],
) -> None:
    """Let a tenant have an allowance of a model, for a time from now on, if both may have one."""
    found = model.allowances.get(account.tenant)
    if not isinstance(found, Allowance) or found.changes != tenants.changes:
        fair = None if model.cached else in_force(model.fair)
        passage = None if fair is None else fair.passage(account.tenant, model.requests)
        if passage is None:
            return
        if found is not None:
            found.end()
        found = Allowance(account, model, passage, costs, tenants, clock)
        account.allowances.append(found)
        model.allowances[account.tenant] = found
    found.until = clock() + HOLDS_SECS


def end_all(model: Model) -> None:
    """Have each request of a model looked at from now on."""
    for each in tuple(model.allowances.values()):
        each.end()


def settle(events: Sequence[Any]) -> None:
    """Make the accounts of these events, each the begin or the end of a record."""
    rest = iter(events)
    first = next(rest, None)
    while first is not None:
        first = first.account.take(first, rest)
