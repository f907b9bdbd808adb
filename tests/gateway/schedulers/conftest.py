"""Schedulers that run for the length of one test, and leave nothing behind."""

from collections.abc import AsyncIterator, Callable

import pytest

from gateway.config import ModelConfig
from tests.conftest import tasks_left
from tests.gateway.schedulers.queues import Queue

Start = Callable[[ModelConfig], Queue]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Run the scheduler of a config; when the test ends nothing is pending, and no task is left."""
    running: list[Queue] = []

    def run(config: ModelConfig) -> Queue:
        running.append(Queue(config))
        return running[-1]

    yield run
    for queue in running:
        await queue.stop()
        assert queue.statistics.pending == 0
    assert tasks_left() == []
