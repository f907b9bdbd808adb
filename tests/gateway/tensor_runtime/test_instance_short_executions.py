"""Executions that are short enough for the event loop."""

import pytest

from gateway.tensor_runtime.instance import (
    FIRST_PAUSE,
    LAST_PAUSE,
    LIMIT_NS,
    TOLERATED,
    TRIALS,
    ShortExecutions,
)

SHORT, LONG = LIMIT_NS // 4, LIMIT_NS + 1
AGES = 5 * LIMIT_NS + 1


def tried(*wall_ns: int, rows: int = 1, runs: ShortExecutions | None = None) -> ShortExecutions:
    runs = runs or ShortExecutions()
    for each in wall_ns:
        runs.ran_on_thread(rows, each)
    return runs


def on_loop() -> ShortExecutions:
    runs = tried(*[SHORT] * TRIALS)
    assert runs.on_loop(1)
    return runs


def ran(runs: ShortExecutions, processor_ns: int) -> None:
    """A run on the loop."""
    kind = runs.on_loop(1)
    assert kind is not None
    kind.ran_on_loop(processor_ns)


def pause(runs: ShortExecutions) -> int:
    """The number of runs on the thread until one is on the loop again."""
    for count in range(2 * LAST_PAUSE):
        if runs.on_loop(1):
            return count
        runs.ran_on_thread(1, SHORT)
    raise AssertionError("never on the loop again")


def test_nothing_runs_on_the_loop_untried() -> None:
    assert not ShortExecutions().on_loop(1)
    assert not tried(*[SHORT] * (TRIALS - 1)).on_loop(1)
    assert tried(*[SHORT] * TRIALS).on_loop(1)


def test_one_short_trial_shows_that_the_others_were_held_up() -> None:
    assert tried(LIMIT_NS, *[AGES] * (TRIALS - 1)).on_loop(1)
    assert tried(*[AGES] * (TRIALS - 1), LIMIT_NS).on_loop(1)


def test_long_executions_stay_on_the_thread() -> None:
    runs = tried(*[LONG] * TRIALS)
    assert not runs.on_loop(1)
    assert pause(runs) == FIRST_PAUSE + TRIALS


def test_numbers_of_rows_are_judged_apart() -> None:
    runs = tried(*[SHORT] * TRIALS, rows=4)
    assert [rows for rows in range(20) if runs.on_loop(rows)] == [4, 5, 6, 7]
    tried(*[LONG] * TRIALS, rows=8, runs=runs)
    assert runs.on_loop(7)
    assert not runs.on_loop(8)


def test_executions_that_become_long_return_to_the_thread() -> None:
    runs = on_loop()
    for _ in range(TOLERATED - 1):
        ran(runs, LONG)
        assert runs.on_loop(1)
    ran(runs, LONG)
    assert not runs.on_loop(1)


def test_a_long_run_now_and_then_is_forgiven() -> None:
    runs = on_loop()
    for _ in range(50):
        ran(runs, LONG)
        ran(runs, SHORT)
    assert runs.on_loop(1)


def test_one_very_long_run_is_not_forgiven() -> None:
    runs = on_loop()
    ran(runs, AGES)
    assert not runs.on_loop(1)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_each_time_it_takes_twice_as_long_until_it_is_tried_again(times: int) -> None:
    runs = on_loop()
    for number in range(times):
        ran(runs, AGES)
        assert pause(runs) == FIRST_PAUSE * 2**number + TRIALS


def test_how_long_it_takes_has_a_bound() -> None:
    runs = on_loop()
    for _ in range(13):
        ran(runs, AGES)
        last = pause(runs)
    assert last == LAST_PAUSE + TRIALS
