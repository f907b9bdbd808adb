"""Models that a test loads by the backend, and that are closed when it ends."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from backends.onnxruntime.backend import OnnxRuntimeBackend
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from tests import onnx_models
from tests.tensor_backends import Load, loading, version_folder


def backend(**settings: str) -> OnnxRuntimeBackend:
    """The backend, with `--backend-config` where `_` stands for `-`."""
    made = OnnxRuntimeBackend()
    made.settings = {key.replace("_", "-"): value for key, value in settings.items()}
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The version folder of a model m."""
    return version_folder(tmp_path)


@pytest.fixture
async def load(folder: Path) -> AsyncIterator[Load]:
    """Write a model, complete its config, load it; closed when the test ends."""
    async with loading(folder, OnnxRuntimeBackend, onnx_models.save) as make:
        yield make


def x_and_y(dims: tuple[int, ...] = (-1,), **fields: Any) -> ModelConfig:
    """A batching config of input x and output y."""
    return ModelConfig(
        name="m",
        max_batch_size=8,
        input=(ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=dims),),
        output=(ModelOutput(name="y", data_type=DataType.TYPE_FP32, dims=dims),),
        **fields,
    )
