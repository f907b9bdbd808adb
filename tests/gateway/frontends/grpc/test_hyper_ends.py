"""Many calls that take their turns with the rest of the event loop."""

import asyncio
from functools import partial
from itertools import pairwise

import pytest

from gateway.frontends.grpc.hyper_ends import TURN_CALLS, in_turns
from tests.builders import soon


@pytest.mark.parametrize("count", [1, TURN_CALLS, 3 * TURN_CALLS + 1])
async def test_calls_keep_their_order_and_other_callbacks_run_between_them(count: int) -> None:
    called: list[int] = []
    seen = [0]
    ended = asyncio.Event()

    def look() -> None:
        seen.append(len(called))
        if len(called) < count:
            asyncio.get_running_loop().call_soon(look)
        else:
            ended.set()

    asyncio.get_running_loop().call_soon(look)
    in_turns(iter([partial(called.append, number) for number in range(count)]))
    assert len(called) == min(count, TURN_CALLS)
    await soon(ended.wait())
    assert called == list(range(count))
    assert max(after - before for before, after in pairwise(seen)) <= TURN_CALLS


async def test_no_calls_are_over_at_once() -> None:
    in_turns(iter(()))


async def test_calls_may_end_tasks() -> None:
    tasks = [asyncio.create_task(asyncio.Event().wait()) for _ in range(2 * TURN_CALLS)]
    await asyncio.sleep(0)
    in_turns(iter([each.cancel for each in tasks]))
    await soon(asyncio.wait(tasks))
    assert all(each.cancelled() for each in tasks)


async def test_a_call_that_fails_keeps_no_other_from_its_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = asyncio.Event()
    in_turns(iter([{}.popitem, *[int] * TURN_CALLS, ended.set]))
    await soon(ended.wait())
    assert caplog.messages == ["end of an RPC failed"]
