"""Buckets of limits per minute, with the time as an argument."""

import math
from random import Random

import pytest

from gateway.admission.booking import TenantAccount
from gateway.admission.quotas import Bucket, Limit, LimitKind, limits_of, shown_secs
from gateway.policy.tenants import NO_RULES, TenantRules

LIMIT = Limit(per_minute=60, burst_secs=60)
"""A unit a second, and at most 60 at once."""
START = 1000.0


def test_a_full_bucket_has_the_units_of_its_burst_and_no_more() -> None:
    bucket = Bucket()
    assert bucket.remaining(LIMIT, START) == 60
    assert bucket.wait_secs(60, LIMIT, START) == 0
    bucket.take(60, LIMIT, START)
    assert bucket.remaining(LIMIT, START) == 0
    assert bucket.wait_secs(1, LIMIT, START) == pytest.approx(1)
    assert bucket.remaining(LIMIT, START + 1000) == 60


@pytest.mark.parametrize("burst_secs", [60.0, 90.0, 7.5])
def test_a_full_bucket_of_any_limit_has_all_of_its_units(burst_secs: float) -> None:
    for per_minute in (*range(1, 1001), 2250, 4500, 9000, 1e9):
        limit = Limit(per_minute, burst_secs)
        assert Bucket().wait_secs(limit.most, limit, START) == 0, per_minute


def test_a_bucket_fills_by_the_second() -> None:
    bucket = Bucket()
    bucket.take(60, LIMIT, START)
    assert bucket.wait_secs(10, LIMIT, START + 4) == pytest.approx(6)
    assert bucket.wait_secs(10, LIMIT, START + 10) == 0
    assert bucket.reset_secs(START + 10) == pytest.approx(50)


def test_more_units_than_a_bucket_ever_holds_are_never_there() -> None:
    assert math.isinf(Bucket().wait_secs(61, LIMIT, START))
    assert math.isinf(Bucket().wait_secs(2**63, LIMIT, START))


def test_a_limit_of_zero_permits_nothing_and_is_over_when_it_is_raised() -> None:
    nothing, bucket = Limit(0, 60), Bucket()
    assert math.isinf(bucket.wait_secs(1, nothing, START))
    assert bucket.wait_secs(0, nothing, START) == 0
    bucket.take(5, nothing, START)
    bucket.settle(-5, nothing, START, START)
    assert bucket.remaining(LIMIT, START) == 60


def test_a_changed_limit_holds_for_the_rest_of_a_bucket() -> None:
    """A key file that halves the limit leaves the bucket half full, as it was."""
    bucket = Bucket()
    bucket.take(30, LIMIT, START)
    assert bucket.remaining(Limit(30, 60), START) == 15


@pytest.mark.parametrize("seed", range(20))
def test_what_was_booked_and_not_given_back_is_what_was_used(seed: int) -> None:
    """Each use settles by the limit of its booking, and uses overlap in any order."""
    draw, bucket, secs, open_uses = Random(seed), Bucket(), 0.0, []
    for _ in range(40):
        limit = Limit(draw.choice([1.0, 60.0, 977.0]), 60)
        booked, used = draw.uniform(0, 10_000), draw.choice([0.0, draw.uniform(0, 20_000)])
        back_at = bucket.take(booked, limit, START)
        open_uses.append((booked - used, limit, back_at))
        secs += limit.secs(used)
    draw.shuffle(open_uses)
    for unused, limit, back_at in open_uses:
        bucket.settle(unused, limit, START, back_at)
    assert bucket.reset_secs(START) == pytest.approx(secs, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_a_bucket_gives_no_more_than_its_burst_and_what_it_gains(seed: int) -> None:
    """Half of the uses end later, with a part of their units, and give the rest back."""
    draw, bucket, now, taken = Random(seed), Bucket(), START, 0.0
    limit, open_uses = Limit(6000, 90), list[tuple[float, float]]()
    for _ in range(200):
        now += draw.expovariate(5)
        units = draw.uniform(0, 3000)
        while open_uses and draw.random() < 0.3:
            unused, back_at = open_uses.pop(draw.randrange(len(open_uses)))
            bucket.settle(unused, limit, now, back_at)
        wait_secs = bucket.wait_secs(units, limit, now)
        if not wait_secs:
            back_at = bucket.take(units, limit, now)
            unused = draw.choice([0.0, draw.uniform(0, units)])
            open_uses.append((unused, back_at))
            taken += units - unused
        else:
            assert bucket.wait_secs(units, limit, now + wait_secs) < 1e-6
    assert 0.5 * limit.most < taken <= limit.most + (now - START) * 100 + 1e-3


def test_units_that_are_back_by_time_are_not_given_back_a_second_time() -> None:
    """Uses of one a minute that end without any are not saved up."""
    bucket, limit, open_uses = Bucket(), Limit(600, 60), list[float]()
    for minute in range(60):
        now = START + 60 * minute
        assert not bucket.wait_secs(600, limit, now)
        open_uses.append(bucket.take(600, limit, now))
    now, taken = START + 60 * 60, 0
    for back_at in open_uses:
        bucket.settle(600, limit, now, back_at)
        if not bucket.wait_secs(600, limit, now):
            bucket.take(600, limit, now)
            taken += 600
    assert taken == 600


def test_the_limits_of_rules() -> None:
    assert not limits_of(NO_RULES)
    assert not limits_of(TenantRules(weight=3.0, highest_priority=2))
    found = limits_of(TenantRules(tokens_per_minute=600.0, burst=1.5))
    assert found.by_kind == {LimitKind.TOKENS: Limit(600.0, 90.0)}
    assert found.by_kind[LimitKind.TOKENS].most == 900
    assert limits_of(TenantRules(max_in_flight=0))


def test_headers_have_openais_names_and_only_those_of_the_limits() -> None:
    account = TenantAccount("a")
    account.replace(rules := TenantRules(requests_per_minute=60.0, compute_ms_per_minute=1.0))
    bucket = account.buckets[LimitKind.REQUESTS]
    bucket.take(1, limits_of(rules).by_kind[LimitKind.REQUESTS], START)
    headers = {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
    }
    assert dict(account.headers(START)) == headers
    full = {b"x-ratelimit-remaining-requests": b"60", b"x-ratelimit-reset-requests": b"0ms"}
    assert dict(account.headers(START + 1)) == headers | full


@pytest.mark.parametrize(
    ("secs", "shown"),
    [(0, "0ms"), (0.1195, "120ms"), (1, "1s"), (1.2, "2s"), (360, "6m0s"), (3661.5, "1h1m2s")],
)
def test_a_duration_is_shown_as_at_openai(secs: float, shown: str) -> None:
    assert shown_secs(secs) == shown
