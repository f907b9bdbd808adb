"""Routers of replicas that the test drives by hand."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.config import ModelConfig
from gateway.fleet import connection, waiting
from tests.builders import TEXT
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered
from tests.gateway.fleet.routing import Routed, routing
from tests.gateway.fleet.waiting_fleet import ZERO, Clock, Fleet


@pytest.fixture
def hosted() -> ModelConfig:
    """The model of the replicas."""
    return TEXT


@pytest.fixture
async def replicas(hosted: ModelConfig) -> AsyncIterator[list[FakeReplica]]:
    """Two replicas of the model."""
    async with AsyncExitStack() as owner:
        found = [await owner.enter_async_context(listening()) for _ in range(2)]
        for each in found:
            each.offer(offered(hosted))
        yield found


@pytest.fixture
async def routed(tmp_path: Path, replicas: list[FakeReplica]) -> AsyncIterator[Routed]:
    async with routing(tmp_path, *replicas) as found:
        yield found


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are made again at once; no request looks for a replica by itself."""
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 0.005)
    monkeypatch.setattr(connection, "LONGEST_PAUSE_SECS", 0.01)
    monkeypatch.setattr(waiting, "LOOK_SECS", 60.0)


@pytest.fixture
async def fleet(short_times: None, tmp_path: Path) -> AsyncIterator[Fleet]:
    """A fleet without a replica that takes requests."""
    async with listening() as replica:
        replica.offer(offered(ZERO))
        async with routing(tmp_path, replica) as routed:
            found = Fleet(routed, replica)
            await found.goes()
            yield found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the requests that wait, which the test sets."""
    found = Clock()
    monkeypatch.setattr(waiting.WaitingRoom, "_now", staticmethod(lambda: found.now))
    return found
