"""What runs on the event loop, judged by how long it took before."""

import pytest

from gateway.tensor_runtime.thread import (
    FIRST_PAUSE,
    LAST_PAUSE,
    LIMIT_NS,
    TOLERATED,
    TRIALS,
    ShortRuns,
)

SHORT, LONG = LIMIT_NS // 4, LIMIT_NS + 1
AGES = 5 * LIMIT_NS + 1


def tried(*wall_ns: int, rows: int = 1, runs: ShortRuns | None = None) -> ShortRuns:
    runs = runs or ShortRuns()
    for each in wall_ns:
        runs.ran_on_thread(rows, each)
    return runs


def on_loop() -> ShortRuns:
    runs = tried(*[SHORT] * TRIALS)
    assert runs.on_loop(1)
    return runs


def pause(runs: ShortRuns) -> int:
    """How many runs on the thread it takes until one is on the loop again."""
    for count in range(2 * LAST_PAUSE):
        if runs.on_loop(1):
            return count
        runs.ran_on_thread(1, SHORT)
    raise AssertionError("never on the loop again")


def test_nothing_runs_on_the_loop_untried() -> None:
    assert not ShortRuns().on_loop(1)
    assert not tried(*[SHORT] * (TRIALS - 1)).on_loop(1)
    assert tried(*[SHORT] * TRIALS).on_loop(1)


def test_one_short_trial_shows_that_the_others_were_held_up() -> None:
    assert tried(LIMIT_NS, *[AGES] * (TRIALS - 1)).on_loop(1)
    assert tried(*[AGES] * (TRIALS - 1), LIMIT_NS).on_loop(1)


def test_what_is_never_short_stays_on_the_thread() -> None:
    runs = tried(*[LONG] * TRIALS)
    assert not runs.on_loop(1)
    assert pause(runs) == FIRST_PAUSE + TRIALS


def test_numbers_of_rows_are_judged_apart() -> None:
    runs = tried(*[SHORT] * TRIALS, rows=4)
    assert [rows for rows in range(20) if runs.on_loop(rows)] == [4, 5, 6, 7]
    tried(*[LONG] * TRIALS, rows=8, runs=runs)
    assert runs.on_loop(7)
    assert not runs.on_loop(8)


def test_runs_that_become_long_leave_the_loop() -> None:
    runs = on_loop()
    for _ in range(TOLERATED - 1):
        runs.ran_on_loop(1, LONG)
        assert runs.on_loop(1)
    runs.ran_on_loop(1, LONG)
    assert not runs.on_loop(1)


def test_a_long_run_now_and_then_is_forgiven() -> None:
    runs = on_loop()
    for _ in range(50):
        runs.ran_on_loop(1, LONG)
        runs.ran_on_loop(1, SHORT)
    assert runs.on_loop(1)


def test_one_very_long_run_is_not_forgiven() -> None:
    runs = on_loop()
    runs.ran_on_loop(1, AGES)
    assert not runs.on_loop(1)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_each_time_it_takes_twice_as_long_until_it_is_tried_again(times: int) -> None:
    runs = on_loop()
    for number in range(times):
        runs.ran_on_loop(1, AGES)
        assert pause(runs) == FIRST_PAUSE * 2**number + TRIALS


def test_how_long_it_takes_has_a_bound() -> None:
    runs = on_loop()
    for _ in range(13):
        runs.ran_on_loop(1, AGES)
        last = pause(runs)
    assert last == LAST_PAUSE + TRIALS
