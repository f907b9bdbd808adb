"""The light DenseNet computes the values that `onnx` recorded, and its weights are constants."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.storage.fetch import find, locate
from tests.gateway.storage.unpacking.conftest import Unpack

NAME = "densenet-121-onnx"


@pytest.fixture(scope="module")
def folder(unpack: Unpack) -> Path:
    return unpack(NAME)


@pytest.fixture(scope="module")
def session(folder: Path) -> Any:
    onnxruntime = pytest.importorskip("onnxruntime")
    path = folder / "model.onnx"
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_only_the_picture_can_be_set(session: Any) -> None:
    assert {each.name: each.shape for each in session.get_inputs()} == {"data_0": [1, 3, 224, 224]}
    assert session.get_overridable_initializers() == []


def test_its_scores_are_those_recorded_in_the_package(session: Any) -> None:
    onnx = pytest.importorskip("onnx")
    recorded = onnx.TensorProto()
    file = locate(find(NAME)).with_name("light_densenet121_output_0.pb")
    recorded.ParseFromString(file.read_bytes())
    picture = np.random.default_rng(0).random((1, 3, 224, 224), dtype=np.float32)
    [scores] = session.run(["fc6_1"], {"data_0": picture})
    np.testing.assert_allclose(scores, onnx.numpy_helper.to_array(recorded), rtol=2e-3, atol=1e-7)


def test_it_fits_in_what_was_reserved_on_the_disk(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) <= find(NAME).unpacked_bytes
