"""SavedModels and GraphDefs that tests make, and write into folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow
import tensorflow.compat.v1 as tf

from backends.tensorflow.backend import TensorFlowBackend

SERVING = "serving_default"


class MadeModel:
    """A graph, its inputs and outputs by the names of the signature, and its variables."""

    def __init__(self, **specs: Any) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.inputs = {
                name: tf.placeholder(kind, shape, name) for name, (kind, shape) in specs.items()
            }
        self.outputs: dict[str, Any] = {}
        self.initialises = False

    def __enter__(self) -> Mapping[str, Any]:
        self._scope = self.graph.as_default()
        self._scope.__enter__()
        return self.inputs

    def __exit__(self, *error: object) -> None:
        self._scope.__exit__(*error)


def sums(shape: Any = (None, 16), kind: Any = tf.float32) -> MadeModel:
    """SUM = A + B and DIFFERENCE = A - B."""
    made = MadeModel(A=(kind, shape), B=(kind, shape))
    with made as inputs:
        made.outputs["SUM"] = tf.add(inputs["A"], inputs["B"], "SUM")
        made.outputs["DIFFERENCE"] = tf.subtract(inputs["A"], inputs["B"], "DIFFERENCE")
    return made


def unchanged(kind: Any = tf.float32, shape: Any = (None, 2)) -> MadeModel:
    """y is x."""
    made = MadeModel(x=(kind, shape))
    with made as inputs:
        made.outputs["y"] = tf.identity(inputs["x"], "y")
    return made


def scaled(factor: float) -> MadeModel:
    """y is x times a variable, which an operation `init` sets."""
    made = MadeModel(x=(tf.float32, (None, 2)))
    with made as inputs:
        variable = tf.get_variable("factor", initializer=factor, use_resource=False)
        made.outputs["y"] = tf.multiply(inputs["x"], variable, "y")
        tf.global_variables_initializer()
    made.initialises = True
    return made


def save(made: MadeModel, folder: Path, *, tag: str = "serve", signature: str = SERVING) -> Path:
    """Write a SavedModel `model.savedmodel` into a version folder; returns the folder."""
    info = tf.saved_model.build_tensor_info
    with tf.Session(graph=made.graph) as session:
        if made.initialises:
            session.run("init")
        builder = tf.saved_model.Builder(str(folder / "model.savedmodel"))
        definition = tf.saved_model.build_signature_def(
            {name: info(each) for name, each in made.inputs.items()},
            {name: info(each) for name, each in made.outputs.items()},
        )
        builder.add_meta_graph_and_variables(session, [tag], {signature: definition})
        builder.save()
    return folder


def save_graph_def(made: MadeModel, folder: Path) -> Path:
    """Write `model.graphdef` into a version folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.graphdef").write_bytes(made.graph.as_graph_def().SerializeToString())
    return folder


class Doubling(tensorflow.Module):
    """A module of TensorFlow 2 with a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = tensorflow.Variable(2.0)

    @tensorflow.function(input_signature=[tensorflow.TensorSpec([None, 2], tf.float32, "x")])
    def serve(self, x: Any) -> Mapping[str, Any]:
        """y is x, doubled."""
        return {"y": self.factor * x}


def save_doubling(folder: Path) -> Path:
    """Write a SavedModel as TensorFlow 2 does; returns the folder."""
    made = Doubling()
    tensorflow.saved_model.save(made, str(folder / "model.savedmodel"), {SERVING: made.serve})
    return folder


def backend(**settings: str) -> TensorFlowBackend:
    """The backend, with `--backend-config` where `_` stands for `-`."""
    made = TensorFlowBackend()
    made.settings = {key.replace("_", "-"): value for key, value in settings.items()}
    return made
