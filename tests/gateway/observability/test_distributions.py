"""Buckets of everything, quantiles of lately."""

import math

import pytest

from gateway.observability.distributions import WINDOW_SECS, WINDOW_SIZE, Histogram, Summary


@pytest.mark.parametrize(
    ("value", "counts"),
    [(0.5, [1, 0, 0]), (1.0, [1, 0, 0]), (1.5, [0, 1, 0]), (2.0, [0, 1, 0]), (2.1, [0, 0, 1])],
)
def test_a_bucket_holds_what_is_not_above_its_bound(value: float, counts: list[int]) -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value)
    assert histogram.counts == counts
    assert histogram.total == value


MEDIAN = (0.5,)


def test_a_summary_without_observations_knows_no_quantile() -> None:
    summary = Summary()
    assert math.isnan(summary.quantiles(MEDIAN, now=0.0)[0])
    assert (summary.count, summary.total) == (0, 0)


def test_quantiles_are_exact() -> None:
    summary = Summary()
    for value in range(100, 0, -1):
        summary.observe(value, now=1.0)
    assert summary.quantiles((0.0, 0.5, 0.9, 0.99, 1.0), now=1.0) == [1, 51, 91, 100, 100]
    assert (summary.count, summary.total) == (100, 5050)


def test_what_is_longer_ago_than_the_window_is_counted_but_not_in_the_quantiles() -> None:
    summary = Summary()
    summary.observe(1000, now=0.0)
    summary.observe(1, now=1.0)
    assert summary.quantiles((1.0,), now=WINDOW_SECS) == [1000]
    assert summary.quantiles((1.0,), now=WINDOW_SECS + 0.5) == [1]
    assert math.isnan(summary.quantiles((1.0,), now=WINDOW_SECS + 1.5)[0])
    assert (summary.count, summary.total) == (2, 1001)


def test_a_summary_keeps_no_more_than_its_window_holds() -> None:
    summary = Summary()
    for value in (7,) * WINDOW_SIZE + (1, 1):
        summary.observe(value, now=0.0)
    assert summary.quantiles((0.0, 0.001), now=0.0) == [1, 7]
    assert summary.count == WINDOW_SIZE + 2
