"""Completion of a config from an engine, and contradictions, by Triton's rules."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.tensorrt.backend import TensorRtBackend
from gateway.config import InstanceKind, ModelConfig, ModelInput, ModelOutput, TensorReshape
from gateway.config.data_type import DataType
from gateway.config.scheduling import (
    Control,
    ControlInput,
    ControlKind,
    DynamicBatching,
    SequenceBatching,
    State,
)
from gateway.errors import Code, InferenceError
from tests.backends.tensorrt.conftest import (
    NEGATE,
    UP_TO_8,
    M,
    X,
    Y,
    context,
    on,
    refused,
    save,
)
from tests.backends.tensorrt.stand_in.stand_in_plans import Plan, PlannedTensor

FP32 = DataType.TYPE_FP32
WHOLE = replace(
    M,
    max_batch_size=8,
    input=(ModelInput(name="x", data_type=FP32, dims=(4,)),),
    output=(ModelOutput(name="y", data_type=FP32, dims=(4,)),),
)
FIXED = Plan(tensors=(replace(X, dims=(1, 4)), replace(Y, dims=(1, 4))))


def completed(
    backend: TensorRtBackend, folder: Path, plan: Plan = NEGATE, config: ModelConfig = M
) -> ModelConfig:
    save(plan, folder)
    return backend.complete(config, folder)


def refusal(
    backend: TensorRtBackend, folder: Path, config: ModelConfig, plan: Plan = NEGATE
) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        completed(backend, folder, plan, config)
    return caught.value.code, caught.value.message


# Completion.


def test_tensors_batch_size_and_batching_are_the_engines(
    backend: TensorRtBackend, folder: Path
) -> None:
    assert completed(backend, folder) == replace(
        WHOLE, dynamic_batching=DynamicBatching(preferred_batch_size=(8,))
    )


def test_a_complete_config_needs_no_engine(
    backend: TensorRtBackend, folder: Path, world: Any
) -> None:
    whole = completed(backend, folder, config=WHOLE)
    assert whole.dynamic_batching == DynamicBatching(preferred_batch_size=(8,))
    assert world.calls["deserialize_cuda_engine"] == 0


def test_a_plan_is_described_wherever_its_instances_are_to_be(
    backend: TensorRtBackend, folder: Path
) -> None:
    save(NEGATE, folder)
    found = backend.describe(on(M, kind=InstanceKind.KIND_CPU, gpus=()), folder).config
    assert (found.input, found.output) == (WHOLE.input, WHOLE.output)


def test_the_largest_batch_of_the_profiles_in_use_counts(
    backend: TensorRtBackend, folder: Path
) -> None:
    plan = replace(NEGATE, profiles=(UP_TO_8, {"x": ([1, 4], [32, 4], [64, 4])}))
    assert completed(backend, folder, plan).max_batch_size == 8
    both = on(M, profile=("0", "1"))
    assert completed(backend, folder, plan, both).max_batch_size == 64


def test_missing_parts_of_a_tensor_are_filled_in(backend: TensorRtBackend, folder: Path) -> None:
    config = replace(M, input=(ModelInput(name="x"),), output=(ModelOutput(name="y", dims=(-1,)),))
    found = completed(backend, folder, config=config)
    assert found.input == WHOLE.input
    assert found.output == (ModelOutput(name="y", data_type=FP32, dims=(-1,)),)


def test_a_fixed_batch_of_one_is_a_batch(backend: TensorRtBackend, folder: Path) -> None:
    found = completed(backend, folder, FIXED)
    assert (found.max_batch_size, found.dynamic_batching) == (1, None)
    assert found.input == WHOLE.input


def test_dims_that_have_the_batch_say_that_the_model_does_not(
    backend: TensorRtBackend, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(M, input=(ModelInput(name="x", data_type=FP32, dims=(-1, 4)),))
    found = completed(backend, folder, config=config)
    assert found.max_batch_size == 0
    assert found.output == (ModelOutput(name="y", data_type=FP32, dims=(-1, 4)),)
    assert "dims of the config say that it does not batch" in caplog.text


def test_an_output_without_the_batch_makes_it_no_batch(
    backend: TensorRtBackend, folder: Path
) -> None:
    plan = replace(NEGATE, tensors=(X, replace(Y, dims=(4,))))
    found = completed(backend, folder, plan)
    assert (found.max_batch_size, found.input[0].dims) == (0, (-1, 4))


def test_scalars_of_a_batch_are_reshaped(backend: TensorRtBackend, folder: Path) -> None:
    plan = Plan(
        tensors=(replace(X, dims=(-1,)), replace(Y, dims=(-1,))),
        profiles=({"x": ([1], [4], [8])},),
    )
    (found,) = completed(backend, folder, plan).input
    assert (found.dims, found.reshape) == ((1,), TensorReshape())


def test_shape_tensors_are_marked_and_served_without_batches(
    backend: TensorRtBackend, folder: Path
) -> None:
    sizes = PlannedTensor(name="sizes", dims=(2,), type="INT32", host=True)
    plan = Plan(
        tensors=(X, sizes, replace(Y, operation="fill", of=("x", "sizes"), dims=(-1, -1))),
        profiles=(UP_TO_8,),
    )
    found = completed(backend, folder, plan)
    assert found.max_batch_size == 0
    assert [(each.name, each.is_shape_tensor) for each in found.input] == [
        ("x", False),
        ("sizes", True),
    ]


def test_inputs_that_the_server_feeds_are_no_inputs_of_clients(
    backend: TensorRtBackend, folder: Path
) -> None:
    control = replace(X, name="start", dims=(-1, 1))
    state = replace(X, name="in", dims=(-1, 4))
    plan = Plan(
        tensors=(X, control, state, Y, replace(Y, name="out")),
        profiles=({**UP_TO_8, "start": ([1, 1], [4, 1], [8, 1]), "in": UP_TO_8["x"]},),
    )
    start = Control(kind=ControlKind.CONTROL_SEQUENCE_START, fp32_false_true=(0, 1))
    batching = SequenceBatching(
        control_input=(ControlInput(name="start", control=(start,)),),
        state=(State(input_name="in", output_name="out", data_type=FP32, dims=(4,)),),
    )
    found = completed(backend, folder, plan, replace(M, sequence_batching=batching))
    assert [each.name for each in (*found.input, *found.output)] == ["x", "y"]
    assert found.dynamic_batching is None


# Contradictions that completion meets.


def test_a_larger_batch_than_the_engine_takes_is_refused(
    backend: TensorRtBackend, folder: Path
) -> None:
    assert refusal(backend, folder, replace(M, max_batch_size=9)) == (
        Code.INTERNAL,
        "autofill failed for model 'm': configuration specified max-batch 9 but TensorRT engine "
        "only supports max-batch 8",
    )


def test_dims_that_batch_where_the_engine_does_not_are_refused(
    backend: TensorRtBackend, folder: Path
) -> None:
    plan = replace(NEGATE, tensors=(X, replace(Y, dims=(4,))))
    config = replace(M, input=(ModelInput(name="x", data_type=FP32, dims=(4,)),))
    assert refusal(backend, folder, config, plan) == (
        Code.INTERNAL,
        "autofill failed for model 'm': model tensor shape configuration hints for dynamic "
        "batching but the underlying engine doesn't support batching.",
    )


def test_dims_that_contradict_each_other_are_refused(
    backend: TensorRtBackend, folder: Path
) -> None:
    config = replace(
        M,
        input=(ModelInput(name="x", data_type=FP32, dims=(4,)),),
        output=(ModelOutput(name="y", data_type=FP32, dims=(-1, 4)),),
    )
    assert refusal(backend, folder, config) == (
        Code.INTERNAL,
        "unable to autofill for 'm', model tensor configurations are contradicting each other in "
        "terms of whether batching is supported",
    )


# Contradictions that loading meets.


def x_with(**fields: Any) -> ModelConfig:
    return replace(WHOLE, input=(replace(WHOLE.input[0], **fields),))


def y_with(**fields: Any) -> ModelConfig:
    return replace(WHOLE, output=(replace(WHOLE.output[0], **fields),))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (x_with(name="z"), "unexpected inference input 'z', allowed inputs are: x"),
        (y_with(name="z"), "unexpected inference output 'z', allowed outputs are: y"),
        (
            replace(WHOLE, input=()),
            "unable to load model 'm', configuration expects 0 inputs, model provides 1",
        ),
        (
            x_with(data_type=DataType.TYPE_INT32),
            "unexpected datatype TYPE_INT32 for inference input 'x', expecting TYPE_FP32 for 'm'",
        ),
        (
            y_with(data_type=DataType.TYPE_INT32),
            "unexpected datatype TYPE_INT32 for inference output 'y', expecting TYPE_FP32 for 'm'",
        ),
        (
            x_with(dims=(5,)),
            "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,4]) but the model "
            "configuration specifies 2 dimensions (an initial batch dimension because "
            "max_batch_size > 0 followed by the explicit tensor shape, making complete shape "
            "[-1,5])",
        ),
        (
            replace(WHOLE, max_batch_size=0),
            "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,4]) but the model "
            "configuration specifies 1 dimensions (shape [4])",
        ),
        (
            x_with(optional=True),
            "unable to load model 'm', optional input 'x' is not supported: a TensorRT engine "
            "needs every input",
        ),
        (
            x_with(is_shape_tensor=True),
            "input 'x' for model 'm' is incorrectly marked as a shape tensor in the model "
            "configuration.",
        ),
        (
            replace(WHOLE, max_batch_size=9),
            "unexpected configuration maximum batch size 9 for 'm', model maximum is 8",
        ),
        (
            replace(
                WHOLE,
                sequence_batching=SequenceBatching(
                    control_input=(
                        ControlInput(
                            name="start",
                            control=(
                                Control(
                                    kind=ControlKind.CONTROL_SEQUENCE_START,
                                    int32_false_true=(0, 1),
                                ),
                            ),
                        ),
                    ),
                ),
            ),
            "configuration specified sequence control 'start', but model does not provide that "
            "input",
        ),
    ],
)
async def test_a_config_that_contradicts_its_engine_is_refused(
    backend: TensorRtBackend, folder: Path, config: ModelConfig, text: str
) -> None:
    save(NEGATE, folder)
    assert await refused(backend.load(context(config, folder)), Code.INVALID_ARG) == text


async def test_a_shape_tensor_must_be_marked_and_not_batched(
    backend: TensorRtBackend, folder: Path
) -> None:
    sizes = PlannedTensor(name="x", dims=(4,), type="INT32", host=True)
    seen = PlannedTensor(name="y", dims=(1,), type="INT64", operation="sizes", of=("x",))
    save(Plan(tensors=(sizes, seen)), folder)
    config = replace(x_with(data_type=DataType.TYPE_INT32), max_batch_size=0)
    message = await refused(backend.load(context(config, folder)), Code.INVALID_ARG)
    assert message == (
        "input 'x' for model 'm' is a shape tensor but the model configuration doesn't mark it as "
        "a shape tensor."
    )
    config = x_with(data_type=DataType.TYPE_INT32, is_shape_tensor=True)
    message = await refused(backend.load(context(config, folder)), Code.INVALID_ARG)
    assert message == (
        "input 'x' for model 'm' is a shape tensor, which is served without batches only: set "
        "max_batch_size to 0 (found 8) and give each tensor's whole shape"
    )


async def test_an_engine_may_have_more_outputs_than_the_config(
    backend: TensorRtBackend, folder: Path
) -> None:
    save(replace(NEGATE, tensors=(X, Y, replace(Y, name="z"))), folder)
    instance = await backend.load(context(WHOLE, folder))
    await instance.close()
