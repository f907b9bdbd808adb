"""Predicted waits: the fluid model of a fair queue, its correction, and overload by simulation."""

from random import Random

import pytest

from gateway.admission.prediction import LEARNT_ENDS, Correction, WaitPrediction
from tests.gateway.admission.overload import Outcome, Overload

CAPACITY = 8.3
"""Requests per second of the simulated engine, with a queue that is never empty."""


def prediction(weights: dict[str, float] | None = None) -> WaitPrediction:
    return WaitPrediction(lambda tenant: (weights or {}).get(tenant, 1.0))


def drained(*tenants: tuple[str, float], weights: dict[str, float] | None = None) -> WaitPrediction:
    """A full model that serves 10 units a second, an end each second, with waiting requests."""
    found = prediction(weights)
    found.arrive("busy", 0.0, 0.0)
    for second in range(1, 61):
        found.arrive("past", 10.0, second - 1)
        found.begin("past", 10.0, second)
        found.end(second)
    for tenant, service in tenants:
        found.arrive(tenant, service, 60.0)
    return found


def test_service_in_front_takes_its_time_and_so_does_the_next_end() -> None:
    found = drained(("a", 50.0), ("a", 20.0))
    assert found.raw_wait("a", 0, 60.0) == pytest.approx(7.0 + 1.0)


def test_a_tenant_waits_for_no_more_service_of_others_than_its_own_share() -> None:
    waiting = (("flood", 1000.0), ("quiet", 20.0))
    assert drained(*waiting).raw_wait("quiet", 0, 60.0) == pytest.approx(2.0 + 2.0 + 1.0)
    assert drained(*waiting).raw_wait("new", 0, 60.0) == pytest.approx(1.0)
    assert drained(*waiting).raw_wait("flood", 0, 60.0) == pytest.approx(102.0 + 1.0)


def test_weights_scale_shares_and_weight_zero_waits_for_all() -> None:
    weights = {"flood": 3.0, "idle": 0.0}
    found = drained(("flood", 1000.0), ("quiet", 20.0), ("idle", 40.0), weights=weights)
    assert found.raw_wait("quiet", 0, 60.0) == pytest.approx(2.0 + 6.0 + 1.0)
    assert found.raw_wait("idle", 0, 60.0) == pytest.approx(106.0 + 1.0)


def test_a_model_with_room_has_no_wait_but_its_prefill() -> None:
    found = prediction()
    found.room = 2
    found.arrive("a", 10.0, 0.0)
    found.learn_prefill(0.5, 100)
    found.learn_prefill(1.0, 200)
    assert not found.is_full()
    assert found.raw_wait("a", 40, 9.0) == pytest.approx(0.2)
    found.arrive("a", 10.0, 9.0)
    assert found.is_full()


def test_the_time_of_short_prompts_is_none_of_a_long_one() -> None:
    found = prediction()
    for _ in range(20):
        found.learn_prefill(2.0, 1)
    assert found.raw_wait("a", 2500, 0.0) == pytest.approx(2.0)


def test_short_prompts_that_rise_by_chance_say_little_of_one_far_beyond_them() -> None:
    """As of a burst whose later requests have longer names, and wait longer."""
    found = prediction()
    for number in range(200):
        found.learn_prefill(1.0 + number / 1000, len(str(number)) / 4)
    assert found.raw_wait("a", 2500, 0.0) < 1.5


@pytest.mark.parametrize("one_in", [10, 20, 50, 100])
def test_prompts_that_are_rarely_long_are_known(one_in: int) -> None:
    found = prediction()
    for _ in range(5):
        found.learn_prefill(5.0, 2500)
        for _ in range(one_in - 1):
            found.learn_prefill(0.1, 10)
    assert found.raw_wait("a", 2500, 0.0) == pytest.approx(5.0, rel=0.3)


def test_the_time_of_a_rarely_long_prompt_is_not_that_by_the_slope_of_the_short_ones() -> None:
    """The times of short ones differ by chance; one prompt in a hundred is long."""
    draw, found = Random(1), prediction()
    for _ in range(10):
        found.learn_prefill(5.0, 2500)
        for _ in range(99):
            found.learn_prefill(draw.uniform(0.0, 2.0), draw.randrange(10, 60))
            assert 3.5 < found.raw_wait("a", 2500, 0.0) < 7.0


def test_a_long_prompt_is_expected_by_the_latest_times_where_all_have_become_slower() -> None:
    found = prediction()
    for number in range(400):
        for tokens in (10, 1000):
            found.learn_prefill((tokens + 50) / (1000 if number < 300 else 500), tokens)
    assert found.raw_wait("a", 1000, 0.0) == pytest.approx(2.1, rel=0.25)


def test_service_that_is_executed_is_not_in_front() -> None:
    found = drained(*[("a", 10.0)] * 3)
    found.room = 2
    assert found.raw_wait("a", 0, 60.0) == pytest.approx(3.0 * 2 / 4 + 1.0)


def test_a_request_that_leaves_takes_its_service_with_it() -> None:
    found = drained(("a", 50.0))
    found.leave("a", 50.0, 60.0)
    assert found.raw_wait("a", 0, 60.0) == pytest.approx(1.0)
    for left in (found.leave, found.expire):
        found.arrive("b", 5.0, 60.0, 5)
        left("b", 5.0, 60.0, 5)
    found.leave("busy", 0.0, 60.0)
    assert (found.in_flight, found.unanswered, found.is_full()) == (0, 0, False)


def test_a_clock_that_goes_back_counts_no_time() -> None:
    found = drained(("a", 50.0))
    assert found.raw_wait("a", 0, -1e9) == found.raw_wait("a", 0, 60.0)


def test_little_is_known_before_twenty_ends_or_ten_seconds_of_waits() -> None:
    found = prediction()
    found.room = 100
    for _ in range(LEARNT_ENDS):
        assert not found.learnt
        found.arrive("a", 1.0, 0.0)
        found.begin("a", 1.0, 0.0)
        found.end(0.0)
    assert found.learnt
    found = prediction()
    found.arrive("a", 1.0, 0.0)
    found.raw_wait("a", 0, 9.9)
    assert not found.learnt
    found.raw_wait("a", 0, 10.1)
    assert found.learnt


def test_the_correction_rises_with_late_ones_and_falls_slowly_to_one() -> None:
    found = Correction()
    found.learn(0.1)
    assert found.value == 1.0
    for _ in range(10):
        found.learn(9.0)
    assert found.value == pytest.approx(1.18)
    found.learn(1.0)
    assert found.value == pytest.approx(1.178)
    for _ in range(1000):
        found.learn(9.0)
    assert found.value == 4.0


def test_the_whole_answer_is_expected_of_at_most_its_tokens() -> None:
    found = prediction()
    found.output_tokens.add(200)
    found.token_secs.add(0.02)
    assert found.answer_secs() == pytest.approx(4.0)
    assert found.answer_secs(50) == pytest.approx(1.0)


def quantile(outcome: Outcome, share: float) -> float:
    ratios = sorted(outcome.ratios)
    return ratios[int(share * len(ratios))]


def test_under_ten_times_the_load_nearly_all_capacity_is_in_time() -> None:
    outcome = Overload({"a": 10 * CAPACITY}, seed=2).run(60)["a"]
    assert outcome.in_time >= 0.9 * CAPACITY * 60
    assert 0.6 <= quantile(outcome, 0.5) <= 1.1
    assert outcome.sent == pytest.approx(10 * CAPACITY * 60, rel=0.1)
    without = Overload({"a": 10 * CAPACITY}, seed=2, admits=False).run(60)["a"]
    assert without.in_time < 0.3 * CAPACITY * 60


def test_few_are_late_once_the_load_is_known() -> None:
    load = Overload({"a": 10 * CAPACITY}, seed=2)
    before = load.run(15)["a"].late
    outcome = load.run(75)["a"]
    assert outcome.late - before <= 0.07 * outcome.in_time


def test_a_quiet_tenant_is_admitted_and_in_time_next_to_a_flood() -> None:
    outcomes = Overload({"a": 10 * CAPACITY, "b": 0.3 * CAPACITY}, seed=2).run(60)
    assert outcomes["b"].in_time >= 0.95 * outcomes["b"].sent
    assert outcomes["b"].refused == 0
    assert outcomes["a"].refused > 0.8 * outcomes["a"].sent


def test_corrections_are_kept_by_label_since_clients_make_tenants() -> None:
    found = WaitPrediction(lambda tenant: 1.0, lambda tenant: tenant if tenant == "a" else "other")
    for number in range(5000):
        found.learn_wait(f"t{number}", 3.0, 1.0)
    assert found.correction("new") == pytest.approx(3.0, abs=0.1)
    assert found.correction("a") == 1.0
