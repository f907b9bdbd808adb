"""Models of OpenVINO that a test makes, loads by the backend, and closes when it ends."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino.opset13 as op
import pytest

from backends.openvino.backend import OpenVinoBackend
from tests.tensor_backends import Load, loading, version_folder

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


def bounded(*shape: Any) -> Any:
    """y is x, whose shape has dims of bounds: pairs of the least and the most."""
    dims = [openvino.Dimension(*each) if isinstance(each, tuple) else each for each in shape]
    x = op.parameter(openvino.PartialShape(dims), np.float32, name="x")
    x.output(0).set_names({"x"})
    return openvino.Model([called("y", op.relu(x))], [x], "bounded")


def unchanged(element: Any, shape: Shape | None = None) -> Any:
    """The output is the input; both are called x and y."""
    x = port("x", shape or [-1, 2], element)
    x.output(0).set_names({"x", "y"})
    return openvino.Model([op.result(x)], [x], "unchanged")


def pairs(rows: int) -> Any:
    """y is x of six numbers as three pairs; an operation fixes the number of rows."""
    return reshaped([rows, 6], [rows, 3, 2])


def reshaped(shape: Shape, *outputs: Shape) -> Any:
    """y, z and so on are x in other shapes; operations fix its numbers of rows."""
    x = port("x", shape)
    made = [op.reshape(x, op.constant(np.array(each, np.int64)), False) for each in outputs]
    named = [called(name, each) for name, each in zip("yz", made, strict=False)]
    return openvino.Model(named, [x], "reshaped")


def products(factors: list[float]) -> Any:
    """y is x of one row, times the stored factors."""
    x = port("x", [1, len(factors)])
    stored = op.constant(np.array([factors], np.float32))
    return openvino.Model([called("y", op.multiply(x, stored))], [x], "products")


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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The version folder of a model m."""
    return version_folder(tmp_path)


@pytest.fixture
async def load(folder: Path) -> AsyncIterator[Load]:
    """Write a model, complete its config, load it; closed when the test ends."""
    async with loading(folder, OpenVinoBackend, save) as make:
        yield make
