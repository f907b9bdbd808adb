"""Limits of unsent responses on one RPC."""

import asyncio
from contextlib import ExitStack

import pytest

from gateway.frontends.grpc.outbox import MAX_ANSWERS, MAX_BYTES, UnsentResponses
from tests.builders import settle, soon


@pytest.mark.parametrize(
    ("messages", "times"),
    [
        ([b"x"], MAX_ANSWERS),
        ([b"x"] * MAX_ANSWERS, 1),
        ([], MAX_ANSWERS),
        ([bytes(MAX_BYTES // 2)], 2),
    ],
)
async def test_reading_blocks_at_either_limit_until_a_response_is_sent(
    messages: list[bytes], times: int
) -> None:
    unsent = UnsentResponses()
    with ExitStack() as others:
        for _ in range(times - 1):
            others.enter_context(unsent.counted(messages))
        assert not unsent.full
        await soon(unsent.wait_for_room())
        with unsent.counted(messages):
            assert unsent.full
            waiting = asyncio.create_task(unsent.wait_for_room())
            await settle()
            assert not waiting.done()
        await soon(waiting)
        assert not unsent.full
