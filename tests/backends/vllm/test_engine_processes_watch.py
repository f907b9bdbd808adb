"""A watch of processes reports at once that one has ended, and reports it once."""

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest

from backends.vllm.engine_processes import Watch
from gateway.errors import InferenceError
from tests.builders import WAIT_SECS, settle, soon

Processes = list[BaseProcess]


@pytest.fixture
def two() -> Iterator[Processes]:
    """Two processes that do nothing."""
    context = multiprocessing.get_context("spawn")
    processes: Processes = [context.Process(target=time.sleep, args=(60,)) for _ in range(2)]
    for process in processes:
        process.start()
    yield processes
    for process in processes:
        process.kill()
        process.join()


async def test_the_end_of_any_process_is_reported(two: Processes) -> None:
    watch = Watch(two)
    ended = watch.death
    await settle()
    assert not ended.done()
    two[1].kill()
    assert (await soon(ended)).startswith("its engine has stopped")


async def test_a_process_that_ended_before_the_watch_is_reported(two: Processes) -> None:
    two[0].kill()
    two[0].join()
    assert await soon(Watch(two).death) == "its engine has stopped (exit code -9)"


async def test_only_the_first_report_is_delivered() -> None:
    watch = Watch(())
    watch.report("it is tired")
    watch.report("it has stopped")
    assert await soon(watch.death) == "it is tired"


async def test_the_end_of_a_task_is_reported() -> None:
    watch = Watch(())
    watch.add_task(asyncio.create_task(settle()))
    assert await soon(watch.death) == "its engine has stopped"


async def test_a_closed_watch_tells_nothing(two: Processes) -> None:
    watch = Watch(two)
    ended = watch.death
    watch.close()
    two[0].kill()
    watch.report("it has stopped")
    await settle()
    assert not ended.done()


@pytest.mark.parametrize("closed", [False, True])
async def test_killing_ends_every_process_also_those_that_are_closed(
    two: Processes, closed: bool
) -> None:
    watch = Watch(two)
    assert not watch.over
    if closed:
        two[0].kill()
        two[0].join()
        two[0].close()
    watch.kill("it has made no progress for 10 s")
    assert watch.over
    two[1].join(WAIT_SECS)
    assert two[1].exitcode == -signal.SIGKILL
    if closed:
        two.pop(0)
    else:
        assert await soon(watch.death) == (
            "its engine has stopped: it has made no progress for 10 s"
        )


async def test_work_in_an_engine_ends_with_it() -> None:
    watch = Watch(())

    async def work(answer: asyncio.Future[str]) -> str:
        return await answer

    answer = asyncio.get_running_loop().create_future()
    working = asyncio.create_task(watch.unless_ended(work(answer)))
    answer.set_result("done")
    assert await soon(working) == "done"

    never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(watch.unless_ended(work(never)))
    await settle()
    watch.report("it has stopped")
    with pytest.raises(InferenceError, match="it has stopped"):
        await soon(waiting)
