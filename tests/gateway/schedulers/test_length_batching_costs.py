"""What is learnt from measured batches."""

import pytest

from gateway.schedulers.length_batching import (
    DEFAULT_BUDGET,
    LEAST_BUDGET,
    LEAST_OVERHEAD,
    Cost,
    Point,
)

SIZES = (64, 128, 256, 512, 1024, 2048)


def points(overhead: float, per_token: float, slower_from: int = 10**9) -> list[Point]:
    """Times of a runtime whose tokens cost half as much again beyond a size."""
    return [
        Point(size, per_token * (overhead + size + max(0, size - slower_from) / 2))
        for size in SIZES
    ]


def test_a_runtime_that_slows_down_gets_the_size_before() -> None:
    cost = Cost.measured(points(15, 1e-4, slower_from=512))
    assert cost.budget == 512
    assert cost.overhead == pytest.approx(15)


def test_a_runtime_that_gets_faster_and_faster_gets_the_largest_size() -> None:
    cost = Cost.measured(points(4000, 1e-7))
    assert cost.budget == SIZES[-1]
    assert cost.overhead == pytest.approx(SIZES[-1])


def test_the_smallest_of_nearly_equal_sizes_is_enough() -> None:
    assert Cost.measured(points(10, 1e-4)).budget == 512


def test_times_that_do_not_grow_are_all_overhead() -> None:
    flat = [Point(size, 0.001) for size in SIZES]
    assert Cost.measured(flat) == Cost(SIZES[-1], float(SIZES[-1]))


def test_noise_moves_the_overhead_but_little() -> None:
    noisy = [
        Point(each.tokens, each.seconds * factor)
        for each, factor in zip(points(15, 1e-4), (1.05, 0.97, 1.02, 0.99, 1.1, 1.1), strict=True)
    ]
    assert 5 < Cost.measured(noisy).overhead < 40


def test_what_was_measured_on_a_busy_machine_does_not_forbid_batches() -> None:
    busy = [Point(64, 0.05), Point(128, 0.15), Point(256, 0.31)]
    assert Cost.measured(busy) == Cost(LEAST_BUDGET, LEAST_OVERHEAD)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_measurements_teach_nothing(count: int) -> None:
    assert Cost.measured(points(15, 1e-4)[:count]) == Cost.assumed()


def test_an_assumed_cost_has_some_overhead() -> None:
    assert Cost.assumed().budget == DEFAULT_BUDGET
    assert 0 < Cost.assumed(64).overhead < 64
