"""A router of two replicas that the test drives by hand."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.config import ModelConfig
from tests.builders import TEXT
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered
from tests.gateway.fleet.routing import Routed, routing


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
