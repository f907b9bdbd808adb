"""Requests that are admitted without a look at each limit, while nothing is scarce.

Their events are noted in the ledger of the tenants, and `settle` makes their accounts later, in the
order of the events, as a `Booking` and a `Service` would: the same sums at a third of the cost.
"""

from collections.abc import Callable, Sequence

from gateway.admission.booking import Booked, Booking, TenantAccount
from gateway.admission.costs import WITHOUT_TOKENS, ModelCosts
from gateway.admission.quotas import COMPUTE_MS, REQUESTS, TOKENS, Bucket
from gateway.errors import InferenceError
from gateway.messages import InferRequest, StreamRecorder, Usage
from gateway.models.model import Model
from gateway.models.sharing import in_force
from gateway.observability.accounts import BEGUN, ENDED, EXECUTED, FAILED
from gateway.observability.request_record import Record
from gateway.policy.tenants import Event, Tenants
from gateway.schedulers.passages import Passage
from gateway.schedulers.service import NS_PER_MS

HOLDS_SECS = 1.0
"""The time for which an allowance holds, as that for which a tenant is noted as active."""
IS_IN_FLIGHT = 1.0
"""Of a request that has not ended when its begin is taken into account."""
MOST_EVENTS = 4096
"""Events that are noted at a time."""
LEAST_TIMES = 2.0
"""Times the mean compute time that each request may take, else the bucket is too empty."""


class Allowance:
    """The requests of a tenant that begin at one model. Implements `Allowed` and `LimitsAccount`.

    While its `passage` has some left, each limit of the tenant has room for these, and for those
    left of its other models. It is for models without tokens, and for one state of the key file.
    A receipt that is kept has it, so it does not keep the model alive.
    """

    __slots__ = (
        "_clock",
        "_ledger",
        "_limits",
        "_most",
        "_now",
        "_of_model",
        "_request_secs",
        "_requests",
        "_tenants",
        "account",
        "bucket",
        "changes",
        "costs",
        "is_limited",
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
        self.changes, self.until, self._now = tenants.changes, 0.0, 0.0
        self._tenants, self._ledger, self._clock = tenants, tenants.ledger, clock
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
        self._now = now
        bucket = self._requests  # as its `take`, without a call
        bucket.full_at = (bucket.full_at if bucket.full_at > now else now) + self._request_secs
        return True

    def recorder(self, record: Record, account: StreamRecorder) -> StreamRecorder:
        """See `Tap`."""
        record.account, record.reader = self, self.passage
        record.released_ns = record.submitted_ns
        if record.batch_size > 1:
            self.passage.left -= record.batch_size - 1  # it may take a place for each
        self._ledger.note((BEGUN, record, self._now, None))
        return account

    def ended(self, record: Record, error: InferenceError | None) -> None:
        """See `LimitsAccount`."""
        passage, account, ledger = self.passage, self.account, self._ledger
        if record.reader is not passage:
            if self.is_limited:
                self._end_apart(record, error)
            return
        ledger.note((ENDED if error is None else FAILED, record, self._clock(), None))
        if record.ended_ns - record.started_ns > account.most_ns:
            account.look()
        if len(ledger.events) > MOST_EVENTS:
            ledger.settle()
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
        account.most_ns = each_ms * NS_PER_MS
        return each_ms > LEAST_TIMES * max(each.costs.compute_ms for each in account.allowances)


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


def settle(events: Sequence[Event]) -> None:
    """Make the accounts of these events, as `Booking` does."""
    for kind, record, now, rows in events:
        allowance = record.account
        passage, own = allowance.passage, record.batch_size or 1
        if kind == EXECUTED:
            passage.charged(own, record.booked[2], now, rows)
            record.booked[2] = 0.0
            continue
        costs, bucket, account = allowance.costs, allowance.bucket, allowance.account
        full_at = bucket.full_at
        if kind == BEGUN:
            booked_ms = costs.compute_ms
            back_at = (full_at if full_at > now else now) + booked_ms * allowance.secs
            bucket.full_at = back_at
            record.booked = [booked_ms, back_at, passage.passed(own), 0.0]
            if not record.ended_ns:  # else its end follows
                record.booked[3] = IS_IN_FLIGHT
                account.in_flight += allowance.is_limited
                passage.entered(own)
            continue
        booked_ms, back_at, estimate, is_in_flight = record.booked
        compute_ms = record.compute_ms(record.ended_ns)
        bucket.give_back((booked_ms - compute_ms) * allowance.secs, now, back_at)
        if estimate and not record.started_ns:
            passage.unused(estimate)
        if is_in_flight:
            account.in_flight -= allowance.is_limited
            passage.left_by(own)
        if kind == ENDED:
            costs.learn_compute(compute_ms)
