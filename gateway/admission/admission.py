"""Admission of requests: limits of tenants, refusals, and accounts of accepted requests."""

import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any

from gateway.admission.allowances import allow, end_all, settle
from gateway.admission.booking import Booked, Booking, TenantAccount
from gateway.admission.costs import WITHOUT_TOKENS, Asked, ModelCosts
from gateway.admission.quotas import (
    COMPUTE_MS,
    REQUESTS,
    TOKENS,
    WORDS,
    Limit,
    LimitKind,
    TenantLimits,
    headers_in,
    limits_of,
    texts,
)
from gateway.admission.waits import MOST_RETRY_SECS, WAIT_METRICS, Waits
from gateway.backend import MetricReading
from gateway.errors import (
    IN_FLIGHT,
    ROOM_SECS,
    InferenceError,
    Refusal,
    RefusalReason,
    RetryAdvice,
)
from gateway.messages import InferRequest
from gateway.models.model import Model
from gateway.models.sharing import Sharing
from gateway.observability.stream_tap import Tap
from gateway.policy.caller import Caller, tenant_of
from gateway.policy.tenants import NO_RULES, Ledger, TenantRules, Tenants
from gateway.settings import AdmissionSettings

log = logging.getLogger("sluice.admission")

REFUSED = "gateway_refused_total"
ADMISSION_METRICS = {
    REFUSED: "Requests refused by a limit of their tenant, their deadline or a model without room",
    **WAIT_METRICS,
}
NO_LIMITS: Mapping[LimitKind, Limit] = MappingProxyType({})
NO_REQUESTS: Mapping[str, int] = MappingProxyType({})
MOST_ACCOUNTS = 2048
MOST_DROPPED = 128
"""Above it the oldest accounts of tenants without a table are dropped, that many at a time."""
LOG_SECS = 1.0
LOGGED = frozenset({RefusalReason.RATE_LIMITED, RefusalReason.DEADLINE_UNREACHABLE})
"""The reasons that are logged here; frontends log a deadline that has passed, and overload."""


def jitter() -> float:
    """The factor of advised waits, so that refused clients do not all retry at one time."""
    return random.uniform(1, 1.5)


class _Account(TenantAccount):
    """An account with its refusals; `unlogged` are those since the last line of the log.

    Its rules are those of the tenants at that number of `changes`, -1 before any.
    """

    def __init__(self, tenant: str, ledger: Ledger) -> None:
        super().__init__(tenant, ledger)
        self.refused: Counter[str] = Counter()
        self.unlogged = 0
        self.logged_at = -math.inf
        self.changes = -1


class Admission:
    """Decides about each request of a client just before its model gets it.

    `tenants` has the rules, `clock` the time in seconds. The accounts keep their state when rules
    change. `settings` are those of requests with deadlines. `refusals`, by reason, are those of
    requests whose model is not known; the others are in its statistics. While no tenant has rules
    and no model is `observed`, `admit` changes nothing, but for a request with a deadline and a
    model with a default for it.
    """

    def __init__(
        self,
        tenants: Tenants,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = jitter,
        settings: AdmissionSettings | None = None,
    ) -> None:
        self.tenants = tenants
        tenants.ledger.take = settle
        self._waits = Waits(settings or AdmissionSettings(), tenants, jitter)
        self.observed: Collection[Model] = self._waits.models
        self._clock, self._jitter = clock, jitter
        self.refusals: Counter[str] = Counter()
        self._accounts: dict[str, _Account] = {}
        self._costs: dict[Model, ModelCosts] = {}

    def admit(self, request: InferRequest, model: Model, tap: Tap | None) -> Tap | None:
        """The tap of a request: its account around the given tap, or that without limits.

        Raises Refusal. A refused request has cost one request; what an accepted one costs is taken
        when the model accepts it.
        """
        tenant = "" if request.caller is None else request.caller.tenant
        account = self._limited(tenant)
        observes = bool(self.observed or request.deadline or model.max_wait_ns)
        observes = observes and self._waits.observes(request, model)
        has_account = account is not None or tenant in self._accounts
        if not (has_account or observes):
            return tap
        costs = self._costs.get(model) or self._costs_of(model)
        if has_account and not costs.has_tokens:
            allow(self._account(tenant), model, costs, self.tenants, self._clock)
        if not (account or observes):
            return tap
        asked = costs.asked(request)
        if account is not None:
            booked = self._book(request, model, account, costs, asked)
            tap = Booking(account, costs, asked, booked, self._clock, tap)
        return self._waits.admit(request, model, tap, costs, asked) if observes else tap

    def watch(self, request: InferRequest, model: Model, tap: Tap | None) -> Tap | None:
        """As `admit`, for a request of an allowance: only its wait is predicted, if it counts."""
        if not self._waits.observes(request, model):
            return tap
        costs = self._costs_of(model)
        timed = self._waits.admit(request, model, tap, costs, costs.asked(request))
        timed.learns = self._limited(tenant_of(request.caller)) is None
        return timed

    def note(self, request: InferRequest, model: Model, error: InferenceError) -> None:
        """Note a refusal of a request, by this admission or by its model, for its tenant."""
        if isinstance(error, Refusal):
            self._note(self._account(tenant_of(request.caller)), model.name, error)

    def _note(self, account: _Account, model: str, error: Refusal) -> None:
        reason = error.refusal_reason
        limit = error.advice.limit or reason
        account.refused[limit] += 1
        if reason in LOGGED:
            self._log(account, model, limit)

    def _book(
        self,
        request: InferRequest,
        model: Model,
        account: _Account,
        costs: ModelCosts,
        asked: Asked,
    ) -> Booked:
        """The units of a request within the limits of its tenant, which has taken one request."""
        account.look()
        limits, now, prompts = account.limits, self._clock(), asked.prompts
        if (limit := limits.requests) is not None and not request.prepaid:
            self._check(account, REQUESTS, prompts, limit, now)
            account.buckets[REQUESTS].take(1, limit, now)
            prompts -= 1
        if (most := limits.in_flight) is not None and account.in_flight >= most:
            raise self._full(account)
        tokens = 0.0
        if asked is not WITHOUT_TOKENS:
            tokens = costs.tokens(asked, account.tenant, model.max_model_len)
        compute_ms = costs.compute_ms
        if (limit := limits.tokens) is not None:
            self._check(account, TOKENS, tokens, limit, now)
        if (limit := limits.compute_ms) is not None:
            self._check(account, COMPUTE_MS, compute_ms, limit, now)
        return 0 if request.prepaid else prompts, tokens, compute_ms, now

    def _check(
        self,
        account: _Account,
        kind: LimitKind,
        needed: float,
        limit: Limit,
        now: float,
    ) -> None:
        bucket = account.buckets[kind]
        wait_secs = bucket.wait_secs(needed, limit, now)
        if not wait_secs:
            return
        word = WORDS[kind]
        if math.isinf(wait_secs):
            fix = "; lower 'max_tokens', or 'n'" if kind is LimitKind.TOKENS else ""
            text = f"may use {limit.most:.0f} {word} at once, the request needs {needed:.0f}{fix}"
        else:
            left = max(0.0, bucket.remaining(limit, now))
            text = (
                f"has {left:.0f} of {limit.per_minute:g} {word} per minute left, the request needs "
                f"{needed:.0f}: in {wait_secs:.1f} s"
            )
        raise self._refusal(account, text, kind, wait_secs)

    def _full(self, account: _Account) -> Refusal:
        most = account.limits.in_flight
        text = f"has {account.in_flight} requests in flight, the most of {most}"
        return self._refusal(account, text, IN_FLIGHT, ROOM_SECS)

    def _refusal(self, account: _Account, text: str, limit: str, wait_secs: float) -> Refusal:
        may_succeed = math.isfinite(wait_secs)
        secs = min(wait_secs * self._jitter(), MOST_RETRY_SECS) if may_succeed else 0.0
        headers = texts(account.headers(self._clock()))
        advice = RetryAdvice(
            retry_after_secs=secs, retries=may_succeed, limit=limit, headers=headers
        )
        return Refusal(RefusalReason.RATE_LIMITED, f"tenant '{account.tenant}' {text}", advice)

    def _log(self, account: _Account, model: str, limit: str) -> None:
        """Log one line a second of a tenant, with the number of refusals since the last one."""
        account.unlogged += 1
        now = self._clock()
        if now < account.logged_at + LOG_SECS:
            return
        fields = {"tenant": account.tenant, "model": model, "limit": limit}
        log.warning("requests refused", extra={**fields, "count": account.unlogged})
        account.logged_at, account.unlogged = now, 0

    def _limited(self, tenant: str) -> _Account | None:
        """The account of a tenant with its present limits; None without any."""
        found = self._accounts.get(tenant)
        if found is None or found.changes != self.tenants.changes:
            rules = self.tenants.rules(tenant)
            if found is None and rules is NO_RULES:
                return None
            found = self._account(tenant)
            found.changes = self.tenants.changes
            if rules is not found.rules:
                found.replace(rules)
        return found if found.is_limited else None

    def _account(self, tenant: str) -> _Account:
        found = self._accounts.get(tenant)
        if found is None:
            if len(self._accounts) >= MOST_ACCOUNTS:
                self._drop_oldest()
            found = self._accounts[tenant] = _Account(tenant, self.tenants.ledger)
        return found

    def _drop_oldest(self) -> None:
        self.tenants.ledger.settle()
        rules, accounts = self.tenants.by_name, self._accounts.values()
        dropped = (each for each in accounts if not (each.in_flight or each.tenant in rules))
        for account in tuple(islice(dropped, MOST_DROPPED)):
            del self._accounts[account.tenant]
            account.end()

    def _costs_of(self, model: Model) -> ModelCosts:
        found = self._costs.get(model)
        if found is None:
            found = self._costs[model] = ModelCosts(model)
            model.when_closed(partial(self._forget, model))
        return found

    def _forget(self, model: Model) -> None:
        self._costs.pop(model, None)
        end_all(model)

    # For frontends.

    def check_head(self, caller: Caller | None, model: Model | None) -> None:
        """Refuse a request by its head, if its tenant has no request or no place left.

        Raises Refusal, which is counted, and has cost what it costs in `admit`. `model` is None if
        the body has its name.
        """
        account = self._limited(tenant_of(caller))
        if account is None:
            return
        account.look()
        now, requests = self._clock(), account.limits.by_kind.get(LimitKind.REQUESTS)
        try:
            if requests is not None:
                self._check(account, LimitKind.REQUESTS, 1, requests, now)
            if account.is_full:
                if requests is not None:
                    account.buckets[LimitKind.REQUESTS].take(1, requests, now)
                raise self._full(account)
        except Refusal as error:
            refusals = self.refusals if model is None else model.statistics.refusals
            refusals[error.refusal_reason] += 1
            self._note(account, "" if model is None else model.name, error)
            raise

    def take_requests(self, caller: Caller | None, model: Model, count: int) -> None:
        """Take as many requests at once, which follow in parts and are `prepaid`; raises Refusal.

        Else a part would be executed before the refusal, at each retry. Compute time is taken by
        each of them, and there must be enough for all.
        """
        limits = self._limits(tenant_of(caller))
        if not limits:
            return
        account, now = self._account(tenant_of(caller)), self._clock()
        account.look()
        compute_ms = count * self._costs_of(model).compute_ms
        booked = {LimitKind.REQUESTS: float(count), LimitKind.COMPUTE_MS: compute_ms}
        taken = {kind: limits[kind] for kind in booked if kind in limits}
        try:
            for kind, limit in taken.items():
                self._check(account, kind, booked[kind], limit, now)
        except Refusal as error:
            model.statistics.refuse(error)
            self._note(account, model.name, error)
            raise
        if LimitKind.REQUESTS in taken:
            account.buckets[LimitKind.REQUESTS].take(count, taken[LimitKind.REQUESTS], now)

    def limits(self, caller: Caller | None) -> bool:
        """Whether a caller has limits that headers show."""
        return bool(self._limits(tenant_of(caller)))

    def _limits(self, tenant: str) -> Mapping[LimitKind, Limit]:
        """The limits per minute of a tenant; one without rules has no account."""
        account = self._limited(tenant)
        return NO_LIMITS if account is None else account.limits.by_kind

    def limit_headers(self, caller: Caller | None) -> Mapping[str, str]:
        """The headers of a caller's limits, or metadata of gRPC; none without limits."""
        return texts(headers_in(self.limit_lines(caller)))

    def limit_lines(self, caller: Caller | None) -> bytes:
        """As `limit_headers`, as lines of HTTP."""
        tenant = "" if caller is None else caller.tenant
        found = self._accounts.get(tenant)  # as `_limited`, without a call for most
        if found is None or found.changes != self.tenants.changes:
            found = self._limited(tenant)
        return b"" if found is None else found.lines(self._clock())

    def describe(
        self, models: Iterable[Model] = (), in_flight: Mapping[str, int] = NO_REQUESTS
    ) -> list[dict[str, Any]]:
        """The tenants with rules, and those with requests, as members of JSON.

        Requests that wait are those of `models`; `in_flight` has those of tenants without limits.
        """
        self.tenants.ledger.settle()
        queues = [each.fair for each in models if each.fair is not None]
        names = sorted({*self.tenants.names, *self._accounts})
        return [self._described(name, queues, in_flight.get(name, 0)) for name in names]

    def _described(self, tenant: str, queues: Sequence[Sharing], in_flight: int) -> dict[str, Any]:
        rules = self.tenants.rules(tenant)
        account = self._accounts.get(tenant) or _Account(tenant, self.tenants.ledger)
        return {
            "tenant": tenant,
            "rules": _described_rules(rules),
            "buckets": self._described_buckets(account, limits_of(rules)),
            "in_flight": account.in_flight if account.is_limited else in_flight,
            "waiting": sum(each.waiting(tenant) for each in queues),
            "refused": {str(limit): count for limit, count in account.refused.items()},
        }

    def _described_buckets(self, account: TenantAccount, limits: TenantLimits) -> dict[str, Any]:
        now = self._clock()
        return {
            str(kind): {
                "remaining": round(account.buckets[kind].remaining(limit, now), 1),
                "most": limit.most,
                "reset_secs": round(account.buckets[kind].reset_secs(now), 3),
            }
            for kind, limit in limits.by_kind.items()
        }

    def families(self) -> list[MetricReading]:
        """The metrics of waits; none before the first request with a deadline."""
        return self._waits.families()


def admission_families(admission: Admission | None, models: Iterable[Model]) -> list[MetricReading]:
    """The metrics of refusals, none before the first one, and those of the admission, if any."""
    counts = [
        (each.name, each.version, each.namespace, each.statistics.refusals) for each in models
    ]
    if admission is not None:
        counts.append(("", "", "", admission.refusals))
    found = MetricReading(REFUSED, ADMISSION_METRICS[REFUSED], "counter")
    for name, version, namespace, refusals in sorted(counts, key=lambda each: each[:3]):
        labels = {"model": name, "version": version}
        labels |= {"namespace": namespace} if namespace else {}
        for reason, count in sorted(refusals.items()):
            found.add_sample(REFUSED, {**labels, "reason": reason}, count)
    waits = [] if admission is None else admission.families()
    return [*([found] if found.samples else []), *waits]


def _described_rules(rules: TenantRules) -> dict[str, Any]:
    """The rules without those that are no limit."""
    members = {name: getattr(rules, name) for name in TenantRules.__dataclass_fields__}
    return {name: value for name, value in members.items() if value is not None}
