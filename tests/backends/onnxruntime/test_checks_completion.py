"""Completion of a config from a model file, by Triton's rules."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from backends.onnxruntime.backend import OnnxRuntimeBackend
from gateway.config import (
    BatchInput,
    ModelConfig,
    ModelInput,
    ModelOutput,
    TensorReshape,
)
from gateway.config.data_type import DataType
from gateway.config.scheduling import DynamicBatching, SequenceBatching
from gateway.errors import Code, InferenceError
from gateway.models.config_checks import check_tensors
from tests.backends.onnxruntime.conftest import backend
from tests.onnx_models import add_sub, identity, model, node, save, tensor

EMPTY = ModelConfig(name="m", backend="onnxruntime")
X = ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=(-1,))
Y = ModelOutput(name="y", data_type=DataType.TYPE_FP32, dims=(-1,))


def complete(
    made: Any, folder: Path, config: ModelConfig = EMPTY, on: OnnxRuntimeBackend | None = None
) -> ModelConfig:
    whole = (on or OnnxRuntimeBackend()).complete(config, save(made, folder))
    check_tensors(whole)
    return whole


def test_a_model_that_batches_gets_tensors_batch_size_and_batching(folder: Path) -> None:
    found = complete(add_sub(), folder)
    assert found.max_batch_size == 4
    assert found.dynamic_batching == DynamicBatching(preferred_batch_size=(4,))
    assert [(each.name, each.data_type, each.dims) for each in found.input] == [
        ("INPUT0", DataType.TYPE_FP32, (16,)),
        ("INPUT1", DataType.TYPE_FP32, (16,)),
    ]
    assert [(each.name, each.data_type, each.dims) for each in found.output] == [
        ("OUTPUT0", DataType.TYPE_FP32, (16,)),
        ("OUTPUT1", DataType.TYPE_FP32, (16,)),
    ]


def test_a_model_of_fixed_shape_does_not_batch(folder: Path) -> None:
    found = complete(add_sub((2, 16)), folder)
    assert (found.max_batch_size, found.dynamic_batching) == (0, None)
    assert found.input[0].dims == (2, 16)


def test_one_tensor_without_a_batch_is_enough_not_to_batch(folder: Path) -> None:
    made = model(
        [node("Size", "x", "n"), node("Identity", "x", "y")],
        [tensor("x", ["b", "s"])],
        [tensor("y", ["b", "s"]), tensor("n", [], TensorProto.INT64)],
    )
    found = complete(made, folder)
    assert found.max_batch_size == 0
    assert [each.dims for each in found.output] == [(-1, -1), (1,)]


def test_symbolic_dims_may_have_any_size(folder: Path) -> None:
    assert complete(identity(dims=("b", None, 3, "w")), folder).input[0].dims == (-1, 3, -1)


def test_a_batch_of_scalars_is_reshaped(folder: Path) -> None:
    found = complete(identity(dims=("b",)), folder)
    assert found.max_batch_size == 4
    for each in (found.input[0], found.output[0]):
        assert (each.dims, each.reshape) == ((1,), TensorReshape(shape=()))


@pytest.mark.parametrize(
    ("settings", "size", "batching", "dims"),
    [
        ({}, 4, True, (16,)),
        ({"default_max_batch_size": "7"}, 7, True, (16,)),
        ({"default_max_batch_size": "1"}, 1, False, (16,)),
        ({"default_max_batch_size": "0"}, 0, False, (-1, 16)),
    ],
)
def test_the_default_batch_size_is_configured(
    folder: Path, settings: dict[str, str], size: int, batching: bool, dims: tuple[int, ...]
) -> None:
    found = complete(add_sub(), folder, on=backend(**settings))
    assert found.max_batch_size == size
    assert (found.dynamic_batching is not None) is batching
    assert found.input[0].dims == dims


@pytest.mark.parametrize("text", ["x", "", "-1"])
def test_a_default_batch_size_that_is_none_is_refused(folder: Path, text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        complete(add_sub(), folder, on=backend(default_max_batch_size=text))
    assert caught.value.code is Code.INVALID_ARG
    assert "default-max-batch-size" in caught.value.message


def test_a_batch_size_of_the_config_is_kept(folder: Path) -> None:
    found = complete(add_sub(), folder, replace(EMPTY, max_batch_size=16))
    assert found.max_batch_size == 16
    assert found.dynamic_batching == DynamicBatching(preferred_batch_size=(16,))
    one = complete(add_sub(), folder, replace(EMPTY, max_batch_size=1))
    assert (one.max_batch_size, one.dynamic_batching) == (1, None)


def test_a_batch_size_for_a_model_that_does_not_batch_is_refused(folder: Path) -> None:
    with pytest.raises(InferenceError) as caught:
        complete(add_sub((2, 16)), folder, replace(EMPTY, max_batch_size=2))
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (
        "autofill failed for model 'm': model does not support batching while non-zero "
        "max_batch_size is specified"
    )


@pytest.mark.parametrize(
    "config",
    [
        replace(EMPTY, dynamic_batching=DynamicBatching(max_queue_delay_microseconds=9)),
        replace(EMPTY, sequence_batching=SequenceBatching()),
    ],
)
def test_a_scheduler_of_the_config_is_kept(folder: Path, config: ModelConfig) -> None:
    found = complete(add_sub(), folder, config)
    assert found.dynamic_batching == config.dynamic_batching
    assert found.sequence_batching == config.sequence_batching


def test_a_config_with_both_sides_is_kept_even_without_a_file(folder: Path) -> None:
    config = replace(EMPTY, input=(X,), output=(Y,))
    assert OnnxRuntimeBackend().complete(config, folder) is config
    told = replace(config, input=(), batch_input=(BatchInput(),))
    assert OnnxRuntimeBackend().complete(told, folder) is told


def test_only_the_missing_side_is_filled_in(folder: Path) -> None:
    named = replace(Y, dims=(3,))
    found = complete(identity(), folder, replace(EMPTY, output=(named,)))
    assert found.output == (named,)
    assert [each.name for each in found.input] == ["x"]
    given = replace(X, dims=(5,))
    found = complete(identity(), folder, replace(EMPTY, input=(given,)))
    assert found.input == (given,)
    assert [each.name for each in found.output] == ["y"]


def test_a_model_that_is_not_there_cannot_complete_anything(folder: Path) -> None:
    with pytest.raises(InferenceError) as caught:
        OnnxRuntimeBackend().complete(EMPTY, folder)
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.message == "unable to find '1/model.onnx' for model instance 'm'"


def test_a_sequence_of_tensors_cannot_be_served(folder: Path) -> None:
    made = model(
        [node("SequenceConstruct", "x x", "y")],
        [tensor("x", [2])],
        [helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, [2])],
    )
    with pytest.raises(InferenceError) as caught:
        complete(made, folder)
    assert caught.value.code is Code.UNSUPPORTED
    assert caught.value.message == (
        "'y' of the model is a seq(tensor(float)); only tensors of the protocol's datatypes can be "
        "served"
    )
