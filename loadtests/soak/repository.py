"""The model repository of the soak, written to a folder."""

import shutil
from pathlib import Path

from loadtests.soak.models import MODELS, Form, Model

OPENAI_PROGRAM = Path(__file__).parents[2] / "model_repository" / "openai_python" / "1" / "model.py"


def write_repository(folder: Path) -> None:
    """Write every model of the catalogue."""
    for model in MODELS:
        (folder / model.name / "1").mkdir(parents=True)
        config(folder, model).write_text(model.config)
        version = folder / model.name / "1"
        if model.program:
            (version / "model.py").write_text(model.program)
        elif model.form is Form.OPENAI:
            shutil.copy(OPENAI_PROGRAM, version / "model.py")
        elif model.name == "onnx":
            _write_onnx(version / "model.onnx")


def config(folder: Path, model: Model) -> Path:
    """Where the config of a model is."""
    return folder / model.name / "config.pbtxt"


def _write_onnx(path: Path) -> None:
    """A network that answers `x` as `y`."""
    import onnx
    from onnx import TensorProto, helper

    names = ("x", "y")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 1]) for n in names)
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "graph", [x], [y])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
