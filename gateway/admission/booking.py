"""The account of one request: what it was booked with, and what it has used at its end."""

import time
from collections.abc import Callable
from typing import Self

from gateway.admission.costs import Asked, ModelCosts, used_tokens
from gateway.admission.quotas import Buckets, Limit, LimitKind, TenantLimits, limits_of
from gateway.errors import Code, InferenceError, Refusal
from gateway.messages import InferResponse, StreamRecorder
from gateway.observability.request_record import Record
from gateway.observability.stream_tap import StreamTap, Tap
from gateway.policy.tenants import NO_RULES, TenantRules


class TenantAccount:
    """The buckets of a tenant, and its requests in flight."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.buckets = Buckets()
        self.in_flight = 0
        self._rules = NO_RULES
        self._limits = limits_of(NO_RULES)

    def limits(self, rules: TenantRules) -> TenantLimits:
        """The limits in the present rules, which seldom change."""
        if rules is not self._rules:
            self._rules, self._limits = rules, limits_of(rules)
        return self._limits


class Booking(StreamTap):
    """The account of one request.

    An accepted request takes its estimated units; its end takes the difference to those it has
    used, by the limits of its booking. Tokens are those of the record, so a cancelled request has
    used what was made. One that its caller ends after its execution has
    begun, and before it reports tokens, has used the estimate of its prompt, its `prefill`.
    """

    __slots__ = (
        "_asked",
        "_back_at",
        "_booked",
        "_clock",
        "_costs",
        "_limits",
        "_prefill",
        "_tenant",
    )

    def __init__(  # noqa: PLR0913 - the parts of an account, each by its name
        self,
        account: TenantAccount,
        limits: TenantLimits,
        costs: ModelCosts,
        asked: Asked,
        booked: dict[LimitKind, float],
        *,
        tap: Tap | None,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(tap)
        self._tenant = account
        self._limits = limits
        self._costs = costs
        self._asked = asked
        self._booked = booked
        self._clock = clock
        self._back_at: dict[LimitKind, float] = {}
        self._prefill = 0.0

    def recorder(self, record: Record, account: StreamRecorder) -> Self:
        """See `Tap`."""
        found = super().recorder(record, account)
        self._tenant.in_flight += 1
        now = self._clock()
        for kind, limit, units in self._charges():
            self._back_at[kind] = self._tenant.buckets[kind].take(units, limit, now)
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
        record, now = self.record, self._clock()
        tokens = used_tokens(record)
        if _is_of_caller(error) and record.has_begun and not tokens:
            tokens = self._prefill = self._costs.prefill(self._asked)
        # An engine that reports tokens executes many requests at once.
        compute_ms = 0.0 if tokens else record.compute_ms(time.perf_counter_ns())
        used = {LimitKind.TOKENS: tokens, LimitKind.COMPUTE_MS: compute_ms}
        self._tenant.in_flight -= 1
        for kind, limit, booked in self._charges():
            unused = booked - used.get(kind, booked)
            self._tenant.buckets[kind].settle(unused, limit, now, self._back_at[kind])
        if error is None and not record.is_hit:
            self._learn(compute_ms)
        self.account.ended(error)

    def _learn(self, compute_ms: float) -> None:
        record = self.record
        if used_tokens(record):
            prompt, answers = record.prompt_tokens, record.completion_tokens
            self._costs.learn(self._asked, self._tenant.tenant, prompt, answers)
        else:
            self._costs.learn_compute(compute_ms)

    def _charges(self) -> list[tuple[LimitKind, Limit, float]]:
        return [(kind, limit, self._booked[kind]) for kind, limit in self._limits.by_kind.items()]


def _is_of_caller(error: InferenceError | None) -> bool:
    """Whether the caller has ended its request, or its deadline has."""
    if isinstance(error, Refusal):
        return error.of_caller
    return error is not None and error.code is Code.CANCELLED
