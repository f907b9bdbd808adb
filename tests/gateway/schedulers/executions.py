"""Executions that a test starts by hand."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import Code, InferenceError
from gateway.stream import ResponseStream
from tests.builders import (
    Execution,
    soon,
    text_response,
)

BROKEN = InferenceError(Code.INVALID_ARG, "no such token")


@dataclass(frozen=True)
class Running:
    """An execution under way, and the streams of its requests."""

    task: asyncio.Task[None]
    streams: list[ResponseStream]


Execute = Callable[..., Running]


async def finish(execution: Execution, *indices: int) -> None:
    """Answer these requests for the last time, and return."""
    for index in indices:
        execution.answer(text_response(f"answer {index}", final=True), index)
    execution.end()
    await soon(execution.stopped.wait())
