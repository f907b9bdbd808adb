"""Tasks that follow files and key sets, and what they notice by the clock."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def followed(following: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a follower for the length of the block; no error ends it before."""
    task = asyncio.create_task(following)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what a follower notices at its next look."""
    while not holds():  # noqa: ASYNC110 - it looks by the clock
        await asyncio.sleep(0.001)
