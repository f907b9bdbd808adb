"""Files that TensorFlow writes, served by OpenVINO: SavedModels, TFLite files and GraphDefs."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow
import tensorflow.compat.v1 as tf

from backends.openvino.backend import OpenVinoBackend
from gateway.config import ModelConfig
from gateway.errors import InferenceError
from tests.backends.tensorflow.models import save, save_doubling, sums
from tests.tensor_backends import Load, ask, floats, loading

Write = Callable[[Path], object]


@pytest.fixture
async def load(folder: Path) -> AsyncIterator[Load]:
    """Write files, complete a config, load the model; closed when the test ends."""
    async with loading(folder, OpenVinoBackend, lambda write, place: write(place)) as make:
        yield make


def of_file(name: str) -> ModelConfig:
    return ModelConfig(backend="openvino", default_model_filename=name)


class Tripling(tensorflow.Module):
    """A module without variables, as converters take it."""

    @tensorflow.function(input_signature=[tensorflow.TensorSpec([None, 2], tf.float32, "x")])
    def serve(self, x: Any) -> Any:
        """y is x, three times."""
        return {"y": 3.0 * x}


def save_lite(folder: Path) -> None:
    made = Tripling()
    concrete = made.serve.get_concrete_function()
    converter = tensorflow.lite.TFLiteConverter.from_concrete_functions([concrete], made)
    (folder / "model.tflite").write_bytes(converter.convert())


def save_graph(folder: Path) -> None:
    (folder / "model.pb").write_bytes(sums().graph.as_graph_def().SerializeToString())


def save_saved_model(folder: Path) -> None:
    save(sums(), folder)


async def test_a_saved_model_with_variables_is_served(load: Load) -> None:
    instance = await load(save_doubling, of_file("model.savedmodel"))
    assert await ask(instance, floats(x=[[1, 2]])) == [{"y": [[2, 4]]}]


async def test_a_tflite_file_is_served_by_the_names_in_it(load: Load) -> None:
    instance = await load(save_lite, of_file("model.tflite"))
    (found,) = await ask(instance, floats(**{"serving_default_x:0": [[1, 2]]}))
    assert found == {"PartitionedCall:0": [[3, 6]]}


async def test_a_graph_def_is_served(load: Load) -> None:
    ones = np.ones((2, 16))
    instance = await load(save_graph, of_file("model.pb"))
    (found,) = await ask(instance, floats(**{"A:0": ones, "B:0": ones}))
    assert found == {"SUM:0": [[2] * 16] * 2, "DIFFERENCE:0": [[0] * 16] * 2}


@pytest.mark.parametrize(
    ("write", "name", "within"),
    [
        (save_saved_model, "model.savedmodel", "saved_model.pb"),
        (save_doubling, "model.savedmodel", "variables/variables.index"),
        (save_lite, "model.tflite", ""),
        (save_graph, "model.pb", ""),
    ],
)
async def test_a_file_that_is_cut_short_is_refused_in_one_line(
    folder: Path,
    load: Load,
    capfd: pytest.CaptureFixture[str],
    write: Write,
    name: str,
    within: str,
) -> None:
    write(folder)
    file = folder / name / within
    file.write_bytes(file.read_bytes()[:-30])
    capfd.readouterr()
    with pytest.raises(InferenceError) as caught:
        await load(None, of_file(name))
    message = caught.value.message
    assert message.startswith("unable to load model 'm': ")
    assert "\n" not in message
    assert str(folder.parents[1]) not in message
    assert "text_format.cc" not in capfd.readouterr().err
