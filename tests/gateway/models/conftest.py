"""Registries that run for the length of one test, and close what they loaded."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.models.repository import ModelRepository
from gateway.models.repository_control import RepositoryControl
from gateway.settings import ModelSettings
from tests.builders import soon
from tests.conftest import tasks_left
from tests.gateway.models.ensembles import chain
from tests.registries import Backends, ScriptedBackend, Start, no_infer, write


@pytest.fixture
async def backend() -> ScriptedBackend:
    """The only backend there is."""
    return ScriptedBackend()


@pytest.fixture
async def start(tmp_path: Path, backend: ScriptedBackend) -> AsyncIterator[Start]:
    """Run registries; when the test ends, each has closed every instance it loaded, once."""
    running = Registries(tmp_path, backend)
    yield running
    await running.stop()
    loaded = [instance for found in backend.instances.values() for instance in found]
    assert [instance.closes for instance in loaded] == [1] * len(loaded)
    assert tasks_left() == []


class Registries:
    """Registries that run until `stop`."""

    def __init__(self, folder: Path, backend: ScriptedBackend) -> None:
        self._folder = folder
        self._backend = backend
        self._tasks: list[asyncio.Task[None]] = []

    async def __call__(
        self, *repositories: Path, settled: bool = True, **options: Any
    ) -> RepositoryControl:
        settings = ModelSettings(repositories=repositories or (self._folder,), **options)
        repository = ModelRepository(
            settings.repositories,
            auto_complete=settings.auto_complete,
            namespacing=settings.namespacing,
        )
        control = RepositoryControl(repository, settings, Backends(self._backend))
        self._tasks.append(asyncio.create_task(control.run(no_infer)))
        if settled:
            await soon(control.registry.wait_settled())
        return control

    async def stop(self) -> None:
        """End them all."""
        while self._tasks:
            task = self._tasks.pop()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await soon(task)


@pytest.fixture
def two_ensembles(tmp_path: Path) -> None:
    """An ensemble `e` of `a` and `b`, and one, `outer`, of `e` and `b`."""
    write(tmp_path, "a", 1)
    write(tmp_path, "b", 1)
    write(tmp_path, "e", 1, text=chain("a", "b"))
    write(tmp_path, "outer", 1, text=chain("e", "b"))
