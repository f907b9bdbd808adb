"""Schedulers that run for the length of one test, and leave nothing behind."""

import gc
from collections.abc import AsyncIterator
from typing import Protocol

import pytest

from gateway.config import ModelConfig
from gateway.policy.tenants import Tenants
from gateway.schedulers.rate_limiter import ExecutionLimiter
from gateway.stream import ResponseStream
from tests.builders import Notebook
from tests.conftest import tasks_left
from tests.gateway.schedulers.queues import Queue


class Start(Protocol):
    """Runs the scheduler of a config until the test ends."""

    def __call__(
        self,
        config: ModelConfig,
        limiter: ExecutionLimiter | None = None,
        tenants: Tenants | None = None,
    ) -> Queue: ...


@pytest.fixture(scope="module", autouse=True)
def _reports_excluded_from_garbage_collection() -> None:
    """Ten thousand tests leave reports, among which each later collection would take 0.4 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Run the scheduler of a config; when the test ends nothing is pending, and no task is left."""
    running: list[Queue] = []

    def run(
        config: ModelConfig,
        limiter: ExecutionLimiter | None = None,
        tenants: Tenants | None = None,
    ) -> Queue:
        running.append(Queue(config, limiter, tenants))
        return running[-1]

    yield run
    for queue in running:
        await queue.stop()
        assert queue.statistics.pending == 0
    assert tasks_left() == []


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


@pytest.fixture
def stream(notebook: Notebook) -> ResponseStream:
    return ResponseStream(notebook, limit=3)
