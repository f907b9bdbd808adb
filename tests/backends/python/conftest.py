"""Loads of a model.py in a worker of its own."""

import gc
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.python.backend import PythonBackend
from gateway.backend import Instance, ModelContext
from gateway.config import ModelConfig
from tests.backends.python.loading import CONFIG, Load, no_model, soon, write
from tests.backends.python.played import Ends
from tests.forked_children import children_fork


@pytest.fixture(scope="module")
def forks() -> Iterator[None]:
    """Workers that the backend starts are forks, in a fifth of the processor time."""
    with children_fork():
        yield


@pytest.fixture
async def load(tmp_path: Path, forks: None) -> AsyncIterator[Load]:
    """Loads models; each is closed at the end, and has left no process, descriptor or task."""
    loaded: list[Instance] = []
    backend = PythonBackend()
    before = len(os.listdir("/proc/self/fd"))

    async def one(code: str, config: ModelConfig = CONFIG, **fields: Any) -> Instance:
        folder = write(tmp_path, code)
        context = ModelContext(
            config=config,
            name=fields.pop("name", "m_0_0"),
            path=folder,
            store=tmp_path,
            infer=fields.pop("infer", no_model),
            wasted=lambda _: None,
            **fields,
        )
        loaded.append(await soon(backend.load(context)))
        return loaded[-1]

    yield one
    for instance in loaded:
        await soon(instance.close())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 3  # the loop's own


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    """A link whose other end is the test."""
    found = Ends()
    yield found
    found.close()
