"""Tiny ONNX models, made where a test needs them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

OPSET = 17
IR_VERSION = 8
Dims = Sequence[int | str | None]


def tensor(name: str, dims: Dims, element: int = TensorProto.FLOAT) -> Any:
    """An input or output of a model; a name or None among the dims is any size."""
    return helper.make_tensor_value_info(name, element, list(dims))


def node(operator: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    """One operator; the names of its inputs and outputs stand between spaces."""
    return helper.make_node(operator, inputs.split(), outputs.split(), **attributes)


def constant(name: str, values: Any) -> Any:
    """An initializer."""
    return onnx.numpy_helper.from_array(np.asarray(values), name)


def model(
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    initializers: Sequence[Any] = (),
    **fields: Any,
) -> Any:
    """A model of one graph; `opset`, `ir_version` and `domain` may be other than usual."""
    graph = helper.make_graph(list(nodes), "graph", inputs, outputs, initializer=list(initializers))
    opsets = [helper.make_opsetid("", fields.get("opset", OPSET))]
    if "domain" in fields:
        opsets.append(helper.make_opsetid(fields["domain"], 1))
    version = fields.get("ir_version", IR_VERSION)
    return helper.make_model(graph, opset_imports=opsets, ir_version=version)


def add_sub(size: Dims = ("batch", 16)) -> Any:
    """OUTPUT0 = INPUT0 + INPUT1 and OUTPUT1 = INPUT0 - INPUT1."""
    return model(
        [node("Add", "INPUT0 INPUT1", "OUTPUT0"), node("Sub", "INPUT0 INPUT1", "OUTPUT1")],
        [tensor("INPUT0", size), tensor("INPUT1", size)],
        [tensor("OUTPUT0", size), tensor("OUTPUT1", size)],
    )


def identity(element: int = TensorProto.FLOAT, dims: Dims = ("batch", "size")) -> Any:
    """y = x."""
    return one("Identity", dims, element)


def one(
    operator: str,
    dims: Dims = (2,),
    element: int = TensorProto.FLOAT,
    domain: str = "",
    **fields: int,
) -> Any:
    """y = operator(x), of one shape and datatype; fields are those of `model`."""
    return model(
        [node(operator, "x", "y", domain=domain)],
        [tensor("x", dims, element)],
        [tensor("y", dims, element)],
        **({"domain": domain} if domain else {}),
        **fields,
    )


def save(made: Any, folder: Path, **options: Any) -> Path:
    """Write `model.onnx` into a folder, which it returns; options go to `onnx.save_model`."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save_model(made, str(folder / "model.onnx"), **options)
    return folder


def write(repository: Path, name: str, made: Any, config: str | None = None) -> None:
    """Add a model with one version to a repository; a config is optional."""
    save(made, repository / name / "1")
    if config is not None:
        (repository / name / "config.pbtxt").write_text(config)
