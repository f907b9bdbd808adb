"""The limits of tenants per minute: buckets in the form of GCRA; the time is an argument."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from gateway.policy.tenants import TenantRules

MINUTE = 60.0


class LimitKind(StrEnum):
    """A limit per minute."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    COMPUTE_MS = "compute_ms"

    # That of an enum is written in Python: several calls for each request.
    __hash__ = str.__hash__


REQUESTS, TOKENS, COMPUTE_MS = LimitKind
"""As names of this module, whose look-up is cheap."""
WORDS = {
    REQUESTS: "requests",
    TOKENS: "tokens",
    COMPUTE_MS: "milliseconds of compute time",
}
"""The units of a limit in the text of a refusal."""
SHOWN = (REQUESTS, TOKENS)
"""The limits with headers, by OpenAI's names."""
NAMES = {
    kind: tuple(f"x-ratelimit-{part}-{kind}" for part in ("limit", "remaining", "reset"))
    for kind in SHOWN
}
LIMIT_HEADERS = tuple(chain.from_iterable(zip(*NAMES.values(), strict=True)))


@dataclass(frozen=True, slots=True)
class Limit:
    """Units per minute; a bucket holds those of `burst_secs`."""

    per_minute: float
    burst_secs: float

    @property
    def most(self) -> float:
        """The units of a full bucket."""
        return self.per_minute * self.burst_secs / MINUTE

    def secs(self, units: float) -> float:
        """The time in which a bucket gains the units."""
        if units <= 0:
            return 0.0
        # In this order a bucket has its burst exactly.
        return units * MINUTE / self.per_minute if self.per_minute > 0 else math.inf


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits of one tenant; those per minute are in `by_kind`, too."""

    by_kind: Mapping[LimitKind, Limit]
    requests: Limit | None
    tokens: Limit | None
    compute_ms: Limit | None
    in_flight: int | None

    def __bool__(self) -> bool:
        return bool(self.by_kind) or self.in_flight is not None


def limits_of(rules: TenantRules) -> TenantLimits:
    """The limits in the rules of a tenant."""
    burst_secs = rules.burst * MINUTE
    given = rules.requests_per_minute, rules.tokens_per_minute, rules.compute_ms_per_minute
    found = {
        kind: Limit(each, burst_secs)
        for kind, each in zip(LimitKind, given, strict=True)
        if each is not None
    }
    return TenantLimits(
        found, found.get(REQUESTS), found.get(TOKENS), found.get(COMPUTE_MS), rules.max_in_flight
    )


class Bucket:
    """The account of one limit: `full_at` is the time at which the bucket is full again.

    The limit is an argument of each call, since a key file may change it; what is used stays used.
    """

    __slots__ = ("full_at",)

    def __init__(self) -> None:
        self.full_at = 0.0

    def wait_secs(self, units: float, limit: Limit, now: float) -> float:
        """The time until the bucket has the units, 0 if it has; infinite if it never holds them."""
        lacks, needed = self.full_at - now, limit.secs(units)
        wait_secs = (needed + lacks if lacks > 0 else needed) - limit.burst_secs
        if wait_secs <= 0:
            return 0.0
        return wait_secs if needed <= limit.burst_secs else math.inf

    def take(self, units: float, limit: Limit, now: float) -> float:
        """Take units, also more than there are; returns the time at which they are back."""
        if limit.per_minute > 0:
            full_at = self.full_at
            self.full_at = (full_at if full_at > now else now) + limit.secs(units)
        return self.full_at

    def settle(self, unused: float, limit: Limit, now: float, back_at: float) -> None:
        """Give back units that were taken by this limit and not used; below 0, take more.

        Units that are back by time, at `back_at` all of them, are not given back a second time.
        """
        if limit.per_minute > 0:
            self.give_back(unused * MINUTE / limit.per_minute, now, back_at)

    def give_back(self, secs: float, now: float, back_at: float) -> None:
        """As `settle`, by the time in which the bucket gains the units."""
        if secs < 0:
            self.full_at = (self.full_at if self.full_at > now else now) - secs
        elif back_at > now:
            left = back_at - now
            self.full_at -= secs if secs < left else left

    def remaining(self, limit: Limit, now: float) -> float:
        """The units that are left; negative after more was used than booked."""
        return limit.most - self.reset_secs(now) * limit.per_minute / MINUTE

    def reset_secs(self, now: float) -> float:
        """The time until it is full."""
        lacks = self.full_at - now
        return lacks if lacks > 0 else 0.0


class Buckets(dict[LimitKind, Bucket]):
    """The buckets of one tenant; one without a limit is never made."""

    def __missing__(self, kind: LimitKind) -> Bucket:
        made = self[kind] = Bucket()
        return made


Header = tuple[bytes, bytes]


class ShownLimit:
    """The headers of a limit, with names and forms of OpenAI's, as lines of HTTP."""

    __slots__ = ("_form", "_full", "_limit", "bucket")

    def __init__(self, kind: LimitKind, bucket: Bucket, limit: Limit) -> None:
        self.bucket, self._limit = bucket, limit
        of_limit, of_rest, of_reset = (each.encode() for each in NAMES[kind])
        first = b"%b: %d" % (of_limit, int(limit.per_minute))
        self._form = b"%b\r\n%b: %%d\r\n%b: %%b\r\n" % (first, of_rest, of_reset)
        self._full = self._lines(0.0)

    def lines(self, now: float) -> bytes:
        """The headers now; those of a full bucket are made once."""
        lacks = self.bucket.full_at - now
        return self._lines(lacks) if lacks > 0 else self._full

    def _lines(self, lacks: float) -> bytes:
        limit = self._limit
        rest = math.floor(limit.most - lacks * limit.per_minute / MINUTE)
        # As `shown_secs`, without a call for most.
        reset = b"%dms" % math.ceil(lacks * 1000) if lacks < 1 else shown_secs(lacks).encode()
        return self._form % (rest if rest > 0 else 0, reset)


def headers_in(lines: bytes) -> list[Header]:
    """The headers in lines of HTTP, each of which ends."""
    parts = (line.partition(b": ") for line in lines.splitlines())
    return [(name, value) for name, _, value in parts]


def texts(headers: Iterable[Header]) -> Mapping[str, str]:
    """Headers as texts."""
    return {name.decode(): value.decode() for name, value in headers}


def shown_secs(secs: float) -> str:
    """A duration in OpenAI's form, rounded up: `120ms`, `1s`, `6m0s`."""
    if secs < 1:
        return f"{math.ceil(secs * 1000)}ms"
    if math.isinf(secs):
        return "never"
    minutes, rest = divmod(math.ceil(secs), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
