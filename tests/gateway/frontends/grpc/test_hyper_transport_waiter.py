"""The future of the task that reads a connection."""

import asyncio
import contextvars
from collections.abc import Callable

import pytest

from gateway.frontends.grpc.hyper_transport import PromptWaiter
from tests.builders import soon

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="caller")


async def steps_of(waiter: PromptWaiter, steps: list[str]) -> None:
    NAME.set("waiting")
    steps.append("waits")
    await waiter
    steps.append(NAME.get())


async def called(act: Callable[[], object]) -> None:
    """Call a function outside of all tasks."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_soon(lambda: (act(), done.set_result(None)))
    await soon(done)


async def test_a_task_continues_in_the_call_that_sets_its_future() -> None:
    steps: list[str] = []
    waiter = PromptWaiter(asyncio.get_running_loop())
    task = asyncio.create_task(steps_of(waiter, steps))
    await asyncio.sleep(0)

    def wake() -> None:
        waiter.set_result(None)
        steps.append("called")

    await called(wake)
    assert steps == ["waits", "waiting", "called"]
    assert waiter.done()
    await soon(task)


async def test_a_future_that_a_task_sets_is_seen_in_the_next_turn() -> None:
    steps: list[str] = []
    waiter = PromptWaiter(asyncio.get_running_loop())
    task = asyncio.create_task(steps_of(waiter, steps))
    await asyncio.sleep(0)
    waiter.set_result(None)
    assert steps == ["waits"]
    await soon(task)
    assert steps == ["waits", "waiting"]


async def test_a_future_that_is_set_early_is_not_waited_for() -> None:
    steps: list[str] = []
    waiter = PromptWaiter(asyncio.get_running_loop())
    task = asyncio.create_task(steps_of(waiter, steps))
    waiter.set_result(None)
    await soon(task)
    assert steps == ["waits", "waiting"]


async def test_a_wait_can_be_cancelled() -> None:
    waiter = PromptWaiter(asyncio.get_running_loop())
    task = asyncio.create_task(steps_of(waiter, []))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(task)
    assert waiter.done()
    assert not waiter.cancel()
    waiter.set_result(None)


async def test_received_bytes_are_the_result() -> None:
    found: list[bytes | None] = []

    async def read(waiter: PromptWaiter) -> None:
        found.append(await waiter)

    waiter = PromptWaiter(asyncio.get_running_loop())
    task = asyncio.create_task(read(waiter))
    await asyncio.sleep(0)
    await called(lambda: waiter.set_result(b"data"))
    assert found == [b"data"]
    await soon(task)
