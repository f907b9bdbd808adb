"""Policies and requests of the dynamic batcher."""

from dataclasses import replace

import pytest

from gateway.config.scheduling import QueuePolicy
from gateway.errors import Code, InferenceError
from gateway.schedulers.execution import Entry
from tests.builders import ScriptedInstance, read_all, settle, soon
from tests.gateway.schedulers.queues import (
    asked,
    finish,
)

BROKEN = InferenceError(Code.INTERNAL, "broken")


def policy(**fields: object) -> QueuePolicy:
    return replace(QueuePolicy(), **fields)  # type: ignore[arg-type]


async def refused(entry: Entry) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        await soon(read_all(entry.stream))
    return caught.value


async def drain(instance: ScriptedInstance, count: int) -> list[str]:
    """Answer `count` executions, and return the text of each."""
    found = []
    for _ in range(count):
        execution = await instance.begun()
        found.append("".join(asked(execution)))
        finish(execution)
    await settle()
    return found
