"""Writes the model files of `tests/repositories/runtimes`; the configs are written by hand.

    .venv/bin/python -m tests.repositories.write_runtimes
    .venv/tensorflow/bin/python -m tests.repositories.write_runtimes tensorflow

Every tensor model answers SUM = A + B for rows of four floats; forests and estimators of rows X.
"""

import importlib
import pickle
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "runtimes"
WIDTH = 4
ROWS = np.random.default_rng(7).random((200, WIDTH), dtype=np.float32)
LABELS = (ROWS[:, 0] + ROWS[:, 1] > 1).astype(int)


def version(model: str) -> Path:
    """The version folder of a model."""
    folder = FOLDER / model / "1"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_onnx() -> None:
    """The sum as ONNX, for ONNX Runtime and for OpenVINO."""
    from onnx import TensorProto, helper, save

    tensors = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", WIDTH])
        for name in ("A", "B", "SUM")
    }
    node = helper.make_node("Add", ["A", "B"], ["SUM"])
    graph = helper.make_graph([node], "sum", [tensors["A"], tensors["B"]], [tensors["SUM"]])
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    for name in ("onnxruntime_onnx", "openvino_onnx"):
        save(model, version(name) / "model.onnx")


def write_openvino() -> None:
    """The sum as IR."""
    import openvino

    from tests.backends.openvino.conftest import called, op, port

    a, b = (port(name, [-1, WIDTH]) for name in "AB")
    model = openvino.Model([called("SUM", op.add(a, b))], [a, b], "sum")
    openvino.save_model(model, version("openvino_ir") / "model.xml", compress_to_fp16=False)


def write_torchscript() -> None:
    """The sum as TorchScript, whose inputs have no names."""
    import torch

    class Sum(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

    torch.jit.script(Sum()).save(str(version("pytorch_libtorch") / "model.pt"))


def write_forests() -> None:
    """One forest for each library."""
    import lightgbm
    import treelite
    import xgboost

    boosted = {"objective": "binary:logistic", "max_depth": 2, "nthread": 1}
    booster = xgboost.train(boosted, xgboost.DMatrix(ROWS, LABELS), 3)
    (version("fil_xgboost") / "xgboost.json").write_bytes(booster.save_raw("json"))
    model = treelite.frontend.from_xgboost(booster)
    model.serialize(str(version("fil_checkpoint") / "checkpoint.tl"))
    leaves = {"objective": "binary", "num_leaves": 4, "verbose": -1, "num_threads": 1}
    grown = lightgbm.train(leaves, lightgbm.Dataset(ROWS, LABELS), 3)
    (version("fil_lightgbm") / "model.txt").write_text(grown.model_to_string())


def write_sklearn() -> None:
    """A pipeline."""
    import skops.io
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    pipeline = make_pipeline(StandardScaler(), LogisticRegression()).fit(ROWS, LABELS)
    skops.io.dump(pipeline, version("sklearn_skops") / "model.skops")
    (version("sklearn_pickle") / "model.pkl").write_bytes(pickle.dumps(pipeline, 4))


def write_tensorflow() -> None:
    """The sum as SavedModel and as GraphDef."""
    models = importlib.import_module("tests.backends.tensorflow.models")
    made = models.sums((None, WIDTH))
    del made.outputs["DIFFERENCE"]
    models.save(made, version("tensorflow_savedmodel"))
    models.save_graph_def(made, version("tensorflow_graphdef"))


if __name__ == "__main__":
    if sys.argv[1:] == ["tensorflow"]:
        write_tensorflow()
        write_sklearn()
    else:
        for write in (write_onnx, write_openvino, write_torchscript, write_forests):
            write()
