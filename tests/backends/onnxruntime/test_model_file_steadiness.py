"""Models that take as long for one request as for another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from backends.onnxruntime.model_file import LARGEST_BYTES, is_steady
from backends.onnxruntime.providers import CPU, CUDA, Provider
from gateway.config import BatchInput, ModelConfig, ModelInput, ModelOperations
from gateway.config.data_type import DataType
from tests.onnx_models import add_sub, constant, model, node, one, save, tensor
from tests.tensor_backends import Load, ask, floats

X = ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=(16,))
CONFIG = ModelConfig(name="m", max_batch_size=4, input=(X,))
ON_CPU: list[Provider] = [(CPU, {})]


def steady(
    folder: Path, made: Any, config: ModelConfig = CONFIG, providers: list[Provider] = ON_CPU
) -> bool:
    return is_steady(config, save(made, folder) / "model.onnx", providers)


def branching(operator: str) -> Any:
    """A model with an operator that holds graphs; it need not be one that loads."""
    body = model([node("Identity", "x", "z")], [], [tensor("z", [16])]).graph
    attributes = {"If": ["then_branch", "else_branch"]}.get(operator, ["body"])
    return model(
        [node(operator, "x", "y", **dict.fromkeys(attributes, body))],
        [tensor("x", ["b", 16], TensorProto.BOOL)],
        [tensor("y", ["b", 16])],
    )


def test_a_small_model_of_fixed_sizes_is_steady(folder: Path) -> None:
    assert steady(folder, add_sub())


@pytest.mark.parametrize("operator", ["If", "Loop", "Scan"])
def test_loops_and_branches_are_not(folder: Path, operator: str) -> None:
    assert not steady(folder, branching(operator))


@pytest.mark.parametrize(
    "operator", ["ConstantOfShape", "Expand", "OneHot", "Pad", "Range", "Resize", "Tile"]
)
def test_operators_with_sizes_from_values_are_not_steady(folder: Path, operator: str) -> None:
    made = model(
        [node(operator, "x", "y")], [tensor("x", [1], TensorProto.INT64)], [tensor("y", ["n"])]
    )
    assert not steady(folder, made)


def test_the_librarys_own_operators_are_not(folder: Path) -> None:
    assert not steady(folder, one("Gelu", domain="com.microsoft"))


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, input=(replace(X, dims=(-1,)),)),
        replace(CONFIG, input=(replace(X, data_type=DataType.TYPE_STRING),)),
        replace(CONFIG, input=(replace(X, allow_ragged_batch=True),)),
        replace(CONFIG, batch_input=(BatchInput(),)),
        replace(CONFIG, model_operations=ModelOperations(op_library_filename=("x.so",))),
    ],
)
def test_sizes_that_vary_and_foreign_operators_are_not(folder: Path, config: ModelConfig) -> None:
    assert not steady(folder, add_sub(), config)


def test_a_model_on_a_gpu_waits_for_it(folder: Path) -> None:
    assert not steady(folder, add_sub(), providers=[(CUDA, {}), (CPU, {})])


def test_large_models_and_other_formats_are_not_looked_into(folder: Path) -> None:
    weights = constant("w", np.zeros(LARGEST_BYTES // 4, dtype=np.float32))
    made = model([node("Size", "w", "y")], [tensor("x", [1])], [tensor("y", [1])], [weights])
    assert not steady(folder, made)
    other = save(add_sub(), folder) / "model.ort"
    (folder / "model.onnx").rename(other)
    assert not is_steady(CONFIG, other, ON_CPU)


async def test_a_loaded_model_has_its_names_and_types(load: Load) -> None:
    tiny = await load(add_sub())
    assert tiny.steady
    for number in range(20):
        ones = np.full((1, 16), number)
        (found,) = await ask(tiny, floats(INPUT0=ones, INPUT1=ones))
        assert found == {"OUTPUT0": [[2 * number] * 16], "OUTPUT1": [[0] * 16]}
    assert not (await load(one("Neg", ("b", "s")))).steady
