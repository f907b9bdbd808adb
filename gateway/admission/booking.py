"""The account of one request: what it was booked with, and what it has used at its end."""

import time
from collections.abc import Callable, Mapping

from gateway.admission.costs import Asked, ModelCosts, used_tokens
from gateway.admission.quotas import Buckets, LimitKind, limits_of
from gateway.errors import Code, InferenceError, Refusal
from gateway.messages import InferResponse, StreamRecorder
from gateway.observability.request_record import Record
from gateway.observability.stream_tap import StreamTap, Tap
from gateway.policy.tenants import NO_RULES, TenantRules

NOTHING = 0.0, 0.0
"""Units of a kind that was not booked, and the time at which they are back."""


class TenantAccount:
    """The buckets of a tenant, its requests in flight, and the limits in its present rules.

    It `is_limited` if there are any.
    """

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.buckets = Buckets()
        self.in_flight = 0
        self.replace(NO_RULES)

    @property
    def is_full(self) -> bool:
        """Whether it has as many requests in flight as it may."""
        most = self.limits.in_flight
        return most is not None and self.in_flight >= most

    def replace(self, rules: TenantRules) -> None:
        """Take rules that have changed."""
        self.rules, self.limits = rules, limits_of(rules)
        self.is_limited = bool(self.limits)


class Booking(StreamTap):
    """The account of one request.

    An accepted request takes the `booked` units, estimates by kind of limit; its end takes the
    difference to those it has used, by the limits of its booking. Tokens are those of the record,
    so a cancelled request has used what was made. One that its caller ends after its execution has
    begun, and before it reports tokens, has used the estimate of its prompt, its `prefill`.
    """

    __slots__ = (
        "_asked",
        "_booked",
        "_clock",
        "_costs",
        "_limits",
        "_prefill",
        "_taken",
        "_tenant",
    )

    def __init__(
        self,
        account: TenantAccount,
        costs: ModelCosts,
        asked: Asked,
        booked: Mapping[LimitKind, float],
        *,
        tap: Tap | None,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(tap)
        self._tenant = account
        self._limits = account.limits
        self._costs = costs
        self._asked = asked
        self._booked = booked
        self._clock = clock
        self._taken: dict[LimitKind, tuple[float, float]] = {}
        self._prefill = 0.0

    def recorder(self, record: Record, account: StreamRecorder) -> StreamRecorder:
        """See `Tap`."""
        found = super().recorder(record, account)
        self._tenant.in_flight += 1
        now, buckets = self._clock(), self._tenant.buckets
        for kind, limit in self._limits.by_kind.items():
            units = self._booked[kind]
            if units:
                self._taken[kind] = units, buckets[kind].take(units, limit, now)
        return found

    def wasted(self, response: InferResponse) -> None:
        """See `StreamRecorder`; tokens after the end are taken at once."""
        limit = self._limits.by_kind.get(LimitKind.TOKENS)
        if response.usage is not None and limit is not None:
            units = max(0.0, used_tokens(response.usage) - self._prefill)
            self._tenant.buckets[LimitKind.TOKENS].take(units, limit, self._clock())
            self._prefill = 0.0
        self.account.wasted(response)

    def ended(self, error: InferenceError | None) -> None:
        """See `StreamRecorder`."""
        record = self.record
        tokens = used_tokens(record)
        if error is not None and not tokens and record.has_begun and _is_of_caller(error):
            tokens = self._prefill = self._costs.prefill(self._asked)
        # An engine that reports tokens executes many requests at once.
        compute_ms = 0.0 if tokens else record.compute_ms(time.perf_counter_ns())
        self._tenant.in_flight -= 1
        self._settle(LimitKind.TOKENS, tokens)
        self._settle(LimitKind.COMPUTE_MS, compute_ms)
        if error is None and not record.is_hit:
            self._learn(compute_ms)
        self.account.ended(error)

    def _settle(self, kind: LimitKind, used: float) -> None:
        limit = self._limits.by_kind.get(kind)
        if limit is None:
            return
        booked, back_at = self._taken.get(kind, NOTHING)
        if booked != used:
            self._tenant.buckets[kind].settle(booked - used, limit, self._clock(), back_at)

    def _learn(self, compute_ms: float) -> None:
        record = self.record
        if record.prompt_tokens or record.completion_tokens:
            prompt, answers = record.prompt_tokens, record.completion_tokens
            self._costs.learn(self._asked, self._tenant.tenant, prompt, answers)
        else:
            self._costs.learn_compute(compute_ms)


def _is_of_caller(error: InferenceError) -> bool:
    """Whether the caller has ended its request, or its deadline has."""
    return error.of_caller if isinstance(error, Refusal) else error.code is Code.CANCELLED
