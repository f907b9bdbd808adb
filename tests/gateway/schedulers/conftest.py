"""Executions that a test starts by hand, and a queue of each scheduler."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.observability.statistics import ModelStatistics
from gateway.policy.tenants import TenantRules, Tenants
from gateway.schedulers import dynamic
from gateway.schedulers.execution import Execution
from gateway.schedulers.rate_limiter import ExecutionLimiter
from tests.builders import ScriptedInstance, new_entry, soon, text_request
from tests.gateway.conftest import Start
from tests.gateway.schedulers.every_scheduler import SCHEDULERS, WITHOUT_TASK
from tests.gateway.schedulers.executions import Execute, Running
from tests.gateway.schedulers.queues import Queue


@pytest.fixture
def statistics() -> ModelStatistics:
    return ModelStatistics()


@pytest.fixture
async def instance() -> ScriptedInstance:
    return ScriptedInstance()


@pytest.fixture
async def execute(
    instance: ScriptedInstance, statistics: ModelStatistics
) -> AsyncIterator[Execute]:
    """Start executions of texts; when the test ends, every one of them has ended by itself."""
    tasks: list[asyncio.Task[None]] = []

    def begin(*texts: str) -> Running:
        entries = [new_entry(statistics, text_request(text)) for text in texts]
        tasks.append(asyncio.create_task(Execution(instance, entries, statistics).run()))
        return Running(tasks[-1], [entry.stream for entry in entries])

    yield begin
    await soon(asyncio.wait(tasks))
    assert statistics.pending == 0


@pytest.fixture(params=[False, True], ids=["free", "rate limited"])
def limiter(request: pytest.FixtureRequest) -> ExecutionLimiter | None:
    return ExecutionLimiter() if request.param else None


@pytest.fixture(params=[None, Tenants({"": TenantRules()})], ids=["plain", "fair"])
def tenants(request: pytest.FixtureRequest) -> Tenants | None:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[*SCHEDULERS, *WITHOUT_TASK])
async def queue(
    request: pytest.FixtureRequest,
    start: Start,
    limiter: ExecutionLimiter | None,
    tenants: Tenants | None,
    monkeypatch: pytest.MonkeyPatch,
) -> Queue:
    scheduler = WITHOUT_TASK.get(request.param, request.param)
    monkeypatch.setattr(ScriptedInstance, "has_singles", request.param in WITHOUT_TASK)
    monkeypatch.setattr(dynamic, "ALONE", 0)
    return start(SCHEDULERS[scheduler], limiter, tenants)
