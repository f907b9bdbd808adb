"""Threads for work that would block the event loop."""

import asyncio
import subprocess
import sys
import threading
import weakref
from queue import SimpleQueue

import pytest

from gateway.errors import Code, InferenceError
from gateway.threads import Threads, apart
from tests.builders import WAIT_SECS, soon, uncollected
from tests.serving import wait_until


async def test_a_cancelled_call_that_has_not_begun_never_runs() -> None:
    threads, gate, ran = Threads("test", 1), threading.Event(), list[str]()
    first = threads.start(gate.wait, 20.0)
    second = threads.start(ran.append, "second")
    third = threads.start(ran.append, "third")
    second.cancel()
    await asyncio.sleep(0)  # the next turn of the loop cancels it in the executor
    gate.set()
    await soon(asyncio.wait([first, third]))
    threads.close()
    assert ran == ["third"]


async def test_closed_threads_take_nothing_more() -> None:
    threads = Threads("test", 1)
    threads.close()
    with pytest.raises(InferenceError) as caught:
        await threads.run(print)
    assert caught.value.code is Code.UNAVAILABLE


async def test_a_call_that_waits_when_the_threads_are_closed_fails_as_a_later_one_does() -> None:
    threads, gate = Threads("test", 1), threading.Event()
    first = threads.start(gate.wait, 20.0)
    waiting = asyncio.create_task(threads.run(print))
    await asyncio.sleep(0)
    threads.close()
    with pytest.raises(InferenceError) as caught:
        await soon(waiting)
    assert caught.value.code is Code.UNAVAILABLE
    gate.set()
    await soon(first)


async def test_a_call_without_a_thread_fails_and_later_ones_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = Threads("test", 1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as system:
        system.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            await threads.run(print)
    assert await soon(threads.run(lambda: "later")) == "later"
    threads.close()


class Data:
    """The data of a call."""


@pytest.mark.parametrize("way", ["threads", "apart"])
async def test_the_data_of_a_call_that_fails_are_freed_without_garbage_collection(way: str) -> None:
    threads = Threads("test", 1)

    def fail(data: Data) -> None:
        raise InferenceError(Code.INTERNAL, "no")

    async def call(data: Data) -> None:
        with pytest.raises(InferenceError, match="no"):
            await (threads.run(fail, data) if way == "threads" else apart(fail, data))

    with uncollected():
        data = Data()
        freed = weakref.ref(data)
        await call(data)
        del data
        # A thread forgets its call a moment after the result.
        await asyncio.to_thread(wait_until, lambda: freed() is None, "the data are freed")
    threads.close()


async def test_calls_that_block_apart_delay_no_other_call() -> None:
    gate = threading.Event()
    blocked = [asyncio.create_task(apart(gate.wait, 20.0)) for _ in range(40)]
    try:
        await asyncio.sleep(0)
        assert await soon(asyncio.to_thread(lambda: "served")) == "served"
        assert not any(each.done() for each in blocked)
    finally:
        gate.set()
    assert all(await soon(asyncio.gather(*blocked)))


async def test_a_call_apart_continues_without_its_caller_and_its_result_is_discarded() -> None:
    began, gate, discarded = threading.Event(), threading.Event(), SimpleQueue[str]()

    def call() -> str:
        began.set()
        gate.wait(WAIT_SECS)
        return "result"

    calling = asyncio.create_task(apart(call, discard=discarded.put))
    assert await asyncio.to_thread(began.wait, WAIT_SECS)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(calling)
    gate.set()
    assert await asyncio.to_thread(discarded.get, timeout=WAIT_SECS) == "result"


HANGS = """
import logging, sys, threading
from gateway.threads import last_of_process
logging.basicConfig(format="%(message)s %(threads)s")
with last_of_process(0.1):
    threading.Thread(target=threading.Event().wait, name="disk").start()
    {end}
"""


@pytest.mark.parametrize(("end", "status"), [("pass", 0), ("sys.exit(1)", 1)])
def test_a_process_ends_although_a_thread_hangs(end: str, status: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS.format(end=end)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (status, "threads abandoned disk\n")
