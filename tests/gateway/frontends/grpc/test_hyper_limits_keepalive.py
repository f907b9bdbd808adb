"""Strikes for early pings, by gRPC's rules."""

import pytest

from gateway.frontends.grpc.hyper_limits import IDLE_INTERVAL_SECS, PingStrikes
from gateway.settings import GrpcKeepaliveSettings

MINUTE = 60.0


def strikes(limit: int = 2, *, permitted: bool = False) -> PingStrikes:
    """With a minute between pings."""
    settings = GrpcKeepaliveSettings(
        max_ping_strikes=limit, min_recv_ping_interval_ms=60_000, permit_without_calls=permitted
    )
    return PingStrikes(settings)


def test_pings_in_time_are_no_strikes() -> None:
    found = strikes()
    assert not any(found.is_too_many(n * MINUTE, "same", idle=False) for n in range(100))


def test_one_strike_more_than_allowed_is_too_many() -> None:
    found = strikes(limit=2)
    assert [found.is_too_many(n, "same", idle=False) for n in range(4)] == [
        False,
        False,
        False,
        True,
    ]


def test_strikes_do_not_expire() -> None:
    found = strikes(limit=2)
    times = (0, 59, 300, 359, 600, 659)
    assert [found.is_too_many(at, "same", idle=False) for at in times] == [False] * 5 + [True]


def test_sent_data_reset_the_strikes() -> None:
    found = strikes(limit=1)
    assert not any(found.is_too_many(n, n // 2, idle=False) for n in range(100))


def test_without_a_limit_any_number_is_allowed() -> None:
    found = strikes(limit=0)
    assert not any(found.is_too_many(n / 10, "same", idle=True) for n in range(100))


@pytest.mark.parametrize("permitted", [False, True])
def test_without_an_rpc_the_minimum_interval_of_pings_is_two_hours(permitted: bool) -> None:
    found = strikes(limit=1, permitted=permitted)
    said = [found.is_too_many(n * MINUTE, "same", idle=True) for n in range(3)]
    assert said == [False, False, not permitted]
    rarely = strikes(limit=1)
    times = [n * IDLE_INTERVAL_SECS for n in range(10)]
    assert not any(rarely.is_too_many(at, "same", idle=True) for at in times)
