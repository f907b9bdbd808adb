"""The backend `onnxruntime` on the device, against ONNX Runtime on the CPU and alone."""

from collections.abc import Sequence
from pathlib import Path

import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from loadtests.gpu_check.outcome import Row, Skipped
from loadtests.gpu_check.parts import CPU, CUDA, Asked
from loadtests.gpu_check.tensor_model import SIZE, Array, Network, compare, weights

PROVIDERS = {CUDA: "CUDAExecutionProvider", CPU: "CPUExecutionProvider"}
OPSET, IR_VERSION = 17, 8


def check(asked: Asked) -> Sequence[Row]:
    """The same network as an ONNX file."""
    provider = PROVIDERS[asked.device]
    if provider not in (found := onnxruntime.get_available_providers()):
        raise Skipped(
            f"onnxruntime {onnxruntime.__version__} has no {provider} (it has {', '.join(found)}): "
            "onnxruntime-gpu has it"
        )
    model = _model()
    on_cpu, alone = (_network(model, PROVIDERS[device]) for device in (CPU, asked.device))
    return compare("onnxruntime", write_model, on_cpu, alone, asked)


def write_model(folder: Path) -> None:
    """Put the network into a version's folder."""
    onnx.save(_model(), folder / "model.onnx")


def _model() -> onnx.ModelProto:
    names = ("first", "second")
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["positive"]),
        helper.make_node("MatMul", ["positive", "second"], ["y"]),
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", SIZE]) for name in "xy"
    )
    initializers = [numpy_helper.from_array(*each) for each in zip(weights(), names, strict=True)]
    graph = helper.make_graph(nodes, "network", [x], [y], initializer=initializers)
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION)


def _network(model: onnx.ModelProto, provider: str) -> Network:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[provider])
    if provider not in session.get_providers():
        raise Skipped(f"onnxruntime has {provider}, but it does not start (see the part's log)")

    def run(x: Array) -> Array:
        found: Array = session.run(["y"], {"x": x})[0]
        return found

    return run
