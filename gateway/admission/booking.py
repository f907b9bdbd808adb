"""The account of one request: what it was booked with, and what it has used at its end."""

import math
from collections.abc import Callable
from typing import Protocol

from gateway.admission.costs import Asked, ModelCosts, used_tokens
from gateway.admission.quotas import (
    COMPUTE_MS,
    REQUESTS,
    SHOWN,
    TOKENS,
    Buckets,
    Header,
    ShownLimit,
    headers_in,
    limits_of,
)
from gateway.errors import Code, InferenceError, Refusal
from gateway.messages import StreamRecorder, Usage
from gateway.observability.request_record import Record
from gateway.observability.stream_tap import Tap
from gateway.policy.tenants import NO_RULES, Ledger, TenantRules
from gateway.schedulers.passages import Passage

Booked = tuple[int, float, float, float]
"""The requests, tokens and milliseconds of a request, and the time."""


class PassingRequests(Protocol):
    """The requests of a tenant that begin at a model while its passage has some left."""

    passage: Passage
    costs: ModelCosts

    def end(self) -> None:
        """Have each request looked at from now on."""


class TenantAccount:
    """The buckets of a tenant, its requests in flight, and the limits in its present rules.

    It `is_limited` if there are any. Requests of its `allowances` begin without a look at these.
    The `ledger` has what is not in it yet.
    """

    def __init__(self, tenant: str, ledger: Ledger | None = None) -> None:
        self.tenant, self.ledger = tenant, ledger or Ledger()
        self.allowances: list[PassingRequests] = []
        self.buckets = Buckets()
        self.in_flight = 0
        self.replace(NO_RULES)

    @property
    def is_full(self) -> bool:
        """Whether it has as many requests in flight as it may."""
        most = self.limits.in_flight
        return most is not None and self.in_flight >= most

    def look(self) -> None:
        """Have the next request of each allowance looked at; take what is noted into account."""
        if self.ledger.events:
            self.ledger.settle()
        for each in self.allowances:
            each.passage.left = 0

    def end(self) -> None:
        """End its allowances: the next requests of its tenant have another account."""
        for each in tuple(self.allowances):
            each.end()

    @property
    def left(self) -> int:
        """The requests that begin without a look."""
        return sum(each.passage.left for each in self.allowances if each.passage.left > 0)

    def replace(self, rules: TenantRules) -> None:
        """Take rules that have changed."""
        self.rules, self.limits = rules, limits_of(rules)
        self.is_limited = bool(self.limits)
        by_kind = self.limits.by_kind
        self._shown = [
            ShownLimit(each, self.buckets[each], by_kind[each]) for each in SHOWN if each in by_kind
        ]
        self._full = b"".join([limit.lines(math.inf) for limit in self._shown])

    def lines(self, now: float) -> bytes:
        """The headers of its limits as lines of HTTP; those of full buckets are made once."""
        shown = self._shown
        for each in shown:
            if each.bucket.full_at > now:
                return b"".join([limit.lines(now) for limit in shown])
        return self._full

    def headers(self, now: float) -> list[Header]:
        """The headers of its limits."""
        return headers_in(self.lines(now))


class Booking:
    """The account of one request. Implements `Tap` and `LimitsAccount`.

    An accepted request takes the `booked` units, estimates by kind of limit; its end takes the
    difference to those it has used, by the limits of its booking. Tokens are those of the record,
    so a cancelled request has used what was made. One that its caller ends after its execution has
    begun, and before it reports tokens, has used the estimate of its prompt, its `prefill`. The
    record calls it at its end, so that no event of the stream passes through it.
    """

    __slots__ = (
        "_account",
        "_asked",
        "_booked",
        "_clock",
        "_costs",
        "_inner",
        "_prefill",
        "_tokens_back_at",
        "compute_back_at",
        "limits",
    )

    def __init__(
        self,
        account: TenantAccount,
        costs: ModelCosts,
        asked: Asked,
        booked: Booked,
        clock: Callable[[], float],
        inner: Tap | None,
    ) -> None:
        self._account, self.limits = account, account.limits
        self._costs, self._asked, self._booked = costs, asked, booked
        self._clock, self._inner = clock, inner
        self._tokens_back_at = self.compute_back_at = self._prefill = 0.0

    def recorder(self, record: Record, account: StreamRecorder) -> StreamRecorder:
        """See `Tap`."""
        record.account = self
        tenant, limits = self._account, self.limits
        tenant.in_flight += 1
        requests, tokens, compute_ms, now = self._booked
        if requests and limits.requests is not None:
            tenant.buckets[REQUESTS].take(requests, limits.requests, now)
        if tokens and limits.tokens is not None:
            self._tokens_back_at = tenant.buckets[TOKENS].take(tokens, limits.tokens, now)
        if compute_ms and (limit := limits.compute_ms) is not None:
            self.compute_back_at = tenant.buckets[COMPUTE_MS].take(compute_ms, limit, now)
        inner, self._inner = self._inner, None
        return account if inner is None else inner.recorder(record, account)

    def wasted(self, usage: Usage) -> None:
        """See `LimitsAccount`; tokens after the end are taken at once."""
        limit = self.limits.tokens
        self._account.look()
        if limit is not None:
            units = max(0.0, used_tokens(usage) - self._prefill)
            self._account.buckets[TOKENS].take(units, limit, self._clock())
            self._prefill = 0.0

    def ended(self, record: Record, error: InferenceError | None) -> None:
        """See `LimitsAccount`."""
        self._account.look()
        tokens: float = record.prompt_tokens + record.completion_tokens
        if record.cached_tokens:
            tokens = used_tokens(record)
        if error is not None and not tokens and record.started_ns and _is_of_caller(error):
            tokens = self._prefill = self._costs.prefill(self._asked)
        # An engine that reports tokens executes many requests at once.
        compute_ms = 0.0 if tokens else record.compute_ms(record.ended_ns)
        tenant, limits = self._account, self.limits
        tenant.in_flight -= 1
        _, booked_tokens, booked_ms, _ = self._booked
        if tokens != booked_tokens and (limit := limits.tokens) is not None:
            unused, back_at = booked_tokens - tokens, self._tokens_back_at
            tenant.buckets[TOKENS].settle(unused, limit, self._clock(), back_at)
        if compute_ms != booked_ms and (limit := limits.compute_ms) is not None:
            unused, back_at = booked_ms - compute_ms, self.compute_back_at
            tenant.buckets[COMPUTE_MS].settle(unused, limit, self._clock(), back_at)
        if error is None and not record.is_hit:
            if tokens:
                self._learn(record)
            else:
                self._costs.learn_compute(compute_ms)

    def _learn(self, record: Record) -> None:
        prompt, answers = record.prompt_tokens, record.completion_tokens
        self._costs.learn(self._asked, self._account.tenant, prompt, answers)


def _is_of_caller(error: InferenceError) -> bool:
    """Whether the caller has ended its request, or its deadline has."""
    return error.of_caller if isinstance(error, Refusal) else error.code is Code.CANCELLED
