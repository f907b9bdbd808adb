"""One thread, and its calls in order."""

import asyncio
import threading
import weakref
from collections.abc import Iterator

import pytest

from gateway.tensor_runtime.instance import OwnThread
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
