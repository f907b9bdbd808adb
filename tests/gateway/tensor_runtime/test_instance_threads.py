"""One thread, its calls in order, and calls that no task waits for."""

import asyncio
import threading
import weakref
from collections.abc import Iterator

import pytest

from gateway.tensor_runtime.instance import (
    FIRST_PAUSE,
    LAST_PAUSE,
    LIMIT_NS,
    TOLERATED,
    TRIALS,
    OwnThread,
    ShortExecutions,
)
from tests.builders import WAIT_SECS, soon


@pytest.fixture
def thread() -> Iterator[OwnThread]:
    """A thread for the length of a test; it has ended when the test has."""
    before = set(threading.enumerate())
    made = OwnThread("own")
    mine = set(threading.enumerate()) - before
    yield made
    made.stop()
    for each in mine:
        each.join(WAIT_SECS)
    assert not any(each.is_alive() for each in mine)


async def test_a_call_is_made_on_the_threads_own_name(thread: OwnThread) -> None:
    assert await soon(thread.call(lambda: threading.current_thread().name)) == "own"


async def test_calls_are_made_one_after_the_other(thread: OwnThread) -> None:
    made: list[int] = []
    await soon(asyncio.gather(*(thread.call(lambda n=n: made.append(n)) for n in range(20))))
    assert made == list(range(20))


async def test_the_exception_of_a_call_is_raised_to_its_caller(thread: OwnThread) -> None:
    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        await soon(thread.call(fail))
    assert await soon(thread.call(lambda: 1)) == 1


async def test_even_an_exit_does_not_end_the_thread(thread: OwnThread) -> None:
    def leave() -> None:
        raise GeneratorExit

    with pytest.raises(GeneratorExit):
        await soon(thread.call(leave))
    assert await soon(thread.call(lambda: 1)) == 1


async def test_a_call_cancelled_in_time_is_never_made(thread: OwnThread) -> None:
    gate, made = threading.Event(), []
    first = thread.call(lambda: gate.wait(WAIT_SECS))
    second = thread.call(lambda: made.append(2))
    third = thread.call(lambda: made.append(3))
    second.cancel()
    gate.set()
    await soon(asyncio.gather(first, third))
    assert made == [3]


async def test_the_result_of_a_cancelled_call_is_dropped(thread: OwnThread) -> None:
    began, gate = threading.Event(), threading.Event()

    def fail() -> None:
        began.set()
        gate.wait(WAIT_SECS)
        raise ZeroDivisionError

    call = thread.call(fail)
    await asyncio.to_thread(began.wait, WAIT_SECS)
    call.cancel()
    gate.set()
    assert await soon(thread.call(lambda: 1)) == 1
    assert call.cancelled()


async def test_nothing_of_a_call_is_kept_while_the_thread_waits(thread: OwnThread) -> None:
    class Result:
        pass

    result = await soon(thread.call(Result))
    kept = weakref.ref(result)
    del result
    await soon(thread.call(lambda: None))
    assert kept() is None


def test_a_call_may_outlive_the_loop_that_asked(thread: OwnThread) -> None:
    gate = threading.Event()

    async def ask() -> None:
        thread.call(lambda: gate.wait(WAIT_SECS))

    asyncio.run(ask())
    gate.set()

    async def ask_again() -> int:
        return await soon(thread.call(lambda: 1))

    assert asyncio.run(ask_again()) == 1


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
