"""The eager start of coroutines."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gateway.frontends.grpc.hyper_begun import start_eagerly
from tests.builders import soon

Made = list[asyncio.Task[None]]


@pytest.fixture
def made() -> Made:
    return []


@pytest.fixture
def create(made: Made) -> Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]:
    def keep(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        made.append(asyncio.get_running_loop().create_task(coroutine))
        return made[-1]

    return keep


async def test_a_coroutine_without_a_wait_needs_no_task(create: Any, made: Made) -> None:
    done: list[str] = []

    async def work() -> None:
        done.append("done")

    assert start_eagerly(work(), create) is None
    assert (done, made) == (["done"], [])


async def test_a_waiting_coroutine_continues_as_a_task(create: Any) -> None:
    steps: list[object] = []
    gate: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        steps.append("begun")
        steps.append(await gate)
        await asyncio.sleep(0)
        steps.append(asyncio.current_task())

    task = start_eagerly(work(), create)
    assert steps == ["begun"]
    gate.set_result("opened")
    assert task is not None
    await soon(task)
    assert steps == ["begun", "opened", task]


@pytest.mark.parametrize("result", ["value", "error"])
async def test_a_coroutine_may_wait_for_a_future_that_is_done_early(
    create: Any, result: str
) -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    seen: list[str] = []

    async def work() -> None:
        try:
            await gate
            seen.append("value")
        except ValueError:
            seen.append("error")

    task = start_eagerly(work(), create)
    assert task is not None
    if result == "value":
        gate.set_result(None)
    else:
        gate.set_exception(ValueError())
    await soon(task)
    assert seen == [result]


@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_a_started_coroutine_can_be_cancelled(create: Any, turns: int) -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(0)
            seen.append("cleaned up")
            raise

    task = start_eagerly(work(), create)
    assert task is not None
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(task)
    assert seen == ["cancelled", "cleaned up"]


async def test_an_error_reaches_the_awaiting_task(create: Any) -> None:
    async def early() -> None:
        raise ValueError("early")

    async def late() -> None:
        await asyncio.sleep(0)
        raise ValueError("late")

    with pytest.raises(ValueError, match="early"):
        start_eagerly(early(), create)
    task = start_eagerly(late(), create)
    assert task is not None
    with pytest.raises(ValueError, match="late"):
        await soon(task)
