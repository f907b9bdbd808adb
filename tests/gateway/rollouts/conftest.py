"""A server of the model `m`, which has version 1 at the start."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tasks_left
from tests.gateway.rollouts.servers import NumberedBackend, RolloutServer
from tests.registries import write


@pytest.fixture
async def backend() -> NumberedBackend:
    return NumberedBackend()


@pytest.fixture
async def starting(
    tmp_path: Path, backend: NumberedBackend
) -> AsyncIterator[Callable[[], Awaitable[RolloutServer]]]:
    """Start servers of one folder, with one state directory unless there is another."""
    write(tmp_path / "models", "m", 1)
    running: list[RolloutServer] = []

    async def start(state: str | None = "state", **options: Any) -> RolloutServer:
        place = None if state is None else tmp_path / state
        running.append(RolloutServer(tmp_path / "models", place, backend, **options))
        await running[-1].start()
        return running[-1]

    yield start
    for server in running:
        await server.stop()
    assert tasks_left() == []


@pytest.fixture
async def server(starting: Callable[[], Awaitable[RolloutServer]]) -> RolloutServer:
    return await starting()
