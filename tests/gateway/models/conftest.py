"""Registries that run for the length of one test, and close what they loaded."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.models.repository import ModelRepository
from gateway.models.repository_control import RepositoryControl
from gateway.policy.tenants import Tenants
from gateway.settings import ModelSettings
from gateway.storage.mirror.cache import RemoteCache
from gateway.storage.mirror.downloads import Transfers
from gateway.storage.mirror.mirror import Mirror
from gateway.storage.mirror.settings import CacheBound
from tests.builders import soon
from tests.conftest import tasks_left
from tests.gateway.models.ensembles import chain
from tests.gateway.models.mirrored import Open, config
from tests.registries import Backends, ScriptedBackend, Start, no_infer, write
from tests.remote_stores import MemoryStore


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
        self,
        *repositories: Path | Mirror,
        settled: bool = True,
        tenants: Tenants | None = None,
        **options: Any,
    ) -> RepositoryControl:
        settings = ModelSettings(**options)
        repository = ModelRepository(
            repositories or (self._folder,),
            auto_complete=settings.auto_complete,
            namespacing=settings.namespacing,
        )
        control = RepositoryControl(repository, settings, Backends(self._backend))
        control.tenants = tenants
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


@pytest.fixture
def store() -> MemoryStore:
    """A bucket with a model of three versions, and one of one."""
    made = MemoryStore()
    made.put("m/config.pbtxt", config())
    made.put("m/labels.txt", b"labels")
    for version in (1, 2, 3):
        made.put(f"m/{version}/weights", b"m%d" % version)
    made.put("n/config.pbtxt", config())
    made.put("n/1/weights", b"n1")
    return made


@pytest.fixture
def mirror_of(tmp_path: Path) -> Open:
    def opened(store: MemoryStore, settle_secs: float = 5.0, bound: int = 1 << 30) -> Mirror:
        cache = RemoteCache(tmp_path / "cache", CacheBound(bound))
        mirror = Mirror(store, cache, Transfers(pause_secs=0), settle_secs=settle_secs)
        mirror.open()
        return mirror

    return opened
