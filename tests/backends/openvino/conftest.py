"""Models of OpenVINO that a test makes, loads by the backend, and closes when it ends."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino.opset13 as op
import pytest

from backends.openvino.backend import OpenVinoBackend
from gateway.backend import Instance, ModelContext
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.messages import InferRequest
from gateway.models.reshaped_instance import with_reshapes
from tests.builders import soon

CPU = InstanceGroup(name="m", kind=InstanceKind.KIND_CPU, count=1)
Load = Callable[..., Awaitable[Instance]]
Shape = list[int]


def port(name: str, shape: Shape, element: Any = np.float32) -> Any:
    """An input; -1 in its shape is any size."""
    made = op.parameter(shape, element, name=name)
    made.output(0).set_names({name})
    return made


def called(name: str, node: Any) -> Any:
    """A node whose output has that name."""
    node.output(0).set_names({name})
    return node


def sums(shape: Shape | None = None, element: Any = np.float32) -> Any:
    """SUM = A + B and DIFFERENCE = A - B."""
    a, b = (port(name, shape or [-1, 16], element) for name in "AB")
    outputs = [called("SUM", op.add(a, b)), called("DIFFERENCE", op.subtract(a, b))]
    return openvino.Model(outputs, [a, b], "sums")


def unchanged(element: Any, shape: Shape | None = None) -> Any:
    """The output is the input; both are called x and y."""
    x = port("x", shape or [-1, 2], element)
    x.output(0).set_names({"x", "y"})
    return openvino.Model([op.result(x)], [x], "unchanged")


def pairs(rows: int) -> Any:
    """y is x of six numbers as three pairs; an operation fixes the number of rows."""
    x = port("x", [rows, 6])
    shape = op.constant(np.array([rows, 3, 2], np.int64))
    return openvino.Model([called("y", op.reshape(x, shape, False))], [x], "pairs")


def save(model: Any, folder: Path, name: str = "model.xml") -> Path:
    """Write a model into a version folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    openvino.save_model(model, folder / name, compress_to_fp16=False)
    return folder


def backend(**settings: str) -> OpenVinoBackend:
    """The backend, with `--backend-config` where `_` stands for `-`."""
    made = OpenVinoBackend()
    made.settings = {key.replace("_", "-"): value for key, value in settings.items()}
    return made


def context(config: ModelConfig, folder: Path, group: InstanceGroup = CPU) -> ModelContext:
    """The context to load the model of a version folder."""

    def infer(_: InferRequest) -> Any:
        raise AssertionError("a tensor model sends no request")

    return ModelContext(
        config=config,
        name=f"{config.name}_0",
        group=group,
        path=folder,
        store=folder,
        infer=infer,
        wasted=lambda tokens: None,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The version folder of a model m."""
    made = tmp_path / "m" / "1"
    made.mkdir(parents=True)
    return made


@pytest.fixture
async def load(folder: Path) -> AsyncIterator[Load]:
    """Write a model, complete its config, load it; closed when the test ends."""
    loaded: list[Instance] = []

    async def make(
        made: Any, config: ModelConfig | None = None, on: OpenVinoBackend | None = None
    ) -> Instance:
        if made is not None:
            save(made, folder)
        runtime = on or OpenVinoBackend()
        whole = runtime.complete(replace(config or ModelConfig(), name="m"), folder)
        instance = await soon(runtime.load(context(whole, folder)))
        loaded.append(with_reshapes(instance, whole))
        return loaded[-1]

    yield make
    for instance in loaded:
        await soon(instance.close())
