"""Model files that take long to make, and instances that end with their test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from backends.pytorch.backend import PytorchBackend
from backends.pytorch.instance import PytorchInstance
from gateway.backend import Instance, ModelContext
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.messages import InferRequest
from gateway.stream import ResponseStream
from tests.torch_models import compile_package, export_add_sub

CPU = InstanceGroup(kind=InstanceKind.KIND_CPU)
Load = Callable[..., Awaitable[PytorchInstance]]


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """AddSub of 16 numbers in batches of at most 64, compiled for this CPU."""
    folder = tmp_path_factory.mktemp("compiled")
    return compile_package(export_add_sub(folder / "program.pt2"), folder / "model.pt2")


def context(config: ModelConfig, folder: Path, group: InstanceGroup = CPU) -> ModelContext:
    """The context to load an instance."""
    return ModelContext(
        config=config,
        name="m_0",
        group=group,
        path=folder,
        store=folder,
        infer=_no_other_model,
        wasted=_no_tokens,
    )


@pytest.fixture
async def load() -> AsyncIterator[Load]:
    """Complete a config and load an instance of it; it is closed when the test ends."""
    loaded: list[Instance] = []

    async def start(
        config: ModelConfig,
        folder: Path,
        backend: PytorchBackend | None = None,
        group: InstanceGroup = CPU,
    ) -> PytorchInstance:
        backend = backend or PytorchBackend()
        complete = backend.complete(config, folder)
        instance = await backend.load(context(complete, folder, group))
        loaded.append(instance)
        assert isinstance(instance, PytorchInstance)
        return instance

    yield start
    async with asyncio.timeout(10):
        for instance in loaded:
            await instance.close()


def _no_other_model(request: InferRequest) -> ResponseStream:
    raise AssertionError("no model of PyTorch asks another")


def _no_tokens(count: int) -> None:
    raise AssertionError("no model of PyTorch makes tokens")
