"""The test of two rates: its validity in simulations, its alternatives, and what is kept."""

import json
import math

import numpy as np
import pytest

from gateway.rollouts.sequential_test import RATIOS, Counts, SequentialTest

ALPHA = 0.01
LIMIT = math.log(1 / ALPHA)


def alarms(
    reference: float, tested: float, most: float | None = None, runs: int = 100
) -> tuple[int, float]:
    """The runs that ever reach the limit in 100 blocks, and the median block of the alarm."""
    random = np.random.default_rng(7)
    found = []
    for _ in range(runs):
        test = SequentialTest(most)
        sizes = random.integers(20, 400, 100)
        split = random.binomial(sizes, np.repeat((0.1, 0.3, 0.5, 0.7, 0.9), 20))
        for block, (size, on_tested) in enumerate(zip(sizes, split, strict=True), 1):
            others = size - on_tested
            test.add(
                Counts(int(others), int(random.binomial(others, reference))),
                Counts(int(on_tested), int(random.binomial(on_tested, tested))),
            )
            if test.log_e >= LIMIT:
                found.append(block)
                break
    return len(found), float(np.median(found)) if found else math.inf


@pytest.mark.parametrize("rate", [0.001, 0.02])
def test_equal_rates_are_rarely_an_alarm_while_weights_change(rate: float) -> None:
    assert alarms(rate, rate)[0] <= 3


def test_a_better_candidate_is_no_alarm() -> None:
    assert alarms(0.1, 0.02, runs=50)[0] == 0


def test_a_worse_candidate_is_an_alarm() -> None:
    found, blocks = alarms(0.01, 0.2, runs=20)
    assert found == 20
    assert blocks <= 12


def test_a_rate_above_the_highest_is_an_alarm_without_a_reference() -> None:
    test = SequentialTest(most=0.01)
    for _ in range(40):
        test.add(Counts(), Counts(50, 2))
    assert test.log_e >= LIMIT
    assert test.ratio == pytest.approx(4)


def test_a_rate_at_the_highest_is_rarely_an_alarm() -> None:
    assert alarms(0.0, 0.05, most=0.05)[0] <= 3


@pytest.mark.parametrize("block", [(Counts(100, 3), Counts()), (Counts(), Counts(100, 90))])
def test_a_block_with_one_arm_is_no_evidence(block: tuple[Counts, Counts]) -> None:
    test = SequentialTest()
    test.add(*block)
    assert test.log_e == pytest.approx(0)


def test_the_expected_evidence_of_equal_rates_does_not_grow() -> None:
    test = SequentialTest()
    test.add(Counts(500, 10), Counts())
    rate, most = 0.02, 0.0
    for events in range(6):
        for of_reference in range(21):
            one = SequentialTest()
            one.load(test.dump())
            one.add(Counts(20, of_reference), Counts(5, events))
            most += (
                math.comb(5, events)
                * math.comb(20, of_reference)
                * rate ** (events + of_reference)
                * (1 - rate) ** (25 - events - of_reference)
                * math.exp(one.log_e)
            )
    assert most <= 1


def test_the_ratio_that_requests_could_have_shown_falls_with_their_number() -> None:
    test = SequentialTest()
    shown = []
    for _ in range(3):
        for _ in range(40):
            test.add(Counts(180, 2), Counts(20, 0))
        shown.append(test.shown_ratio(LIMIT))
    assert SequentialTest().shown_ratio(LIMIT) is None
    assert shown == sorted(shown, key=lambda ratio: -(ratio or math.inf))
    assert shown[-1] in RATIOS[:3]


def test_its_state_survives_json() -> None:
    test = SequentialTest()
    test.add(Counts(100, 1), Counts(20, 5))
    again = SequentialTest()
    again.load(json.loads(json.dumps(test.dump())))
    assert (again.log_e, again.tested, again.ratio) == (test.log_e, test.tested, test.ratio)


@pytest.mark.parametrize("logs", [[0.0], [math.nan] * len(RATIOS), ["x"] * len(RATIOS)])
def test_a_damaged_state_is_refused(logs: list[object]) -> None:
    state = {"logs": logs, "reference": [1, 0], "tested": [1, 0]}
    with pytest.raises(ValueError, match=f"expected {len(RATIOS)} numbers|not convert string"):
        SequentialTest().load(state)


def test_the_interval_of_a_rate_contains_it() -> None:
    low, high = Counts(100, 3).interval()
    assert (round(low, 3), round(high, 3)) == (0.010, 0.085)
    assert Counts().interval() == (0.0, 1.0)
