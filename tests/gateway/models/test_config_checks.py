"""Configurations that Triton accepts, and those that it refuses."""

from dataclasses import replace

import pytest

from gateway.config import (
    ModelConfig,
    ModelInput,
    ModelOutput,
    TensorReshape,
)
from gateway.config.data_type import DataType
from gateway.config.pbtxt import parse
from gateway.errors import Code, InferenceError
from gateway.models.config_checks import check_tensors
from gateway.models.normalisation import normalise


def normalised(text: str) -> ModelConfig:
    """A model of the python backend unless the text says otherwise."""
    return normalise(parse(text, "m/config.pbtxt"), "m", frozenset({"model.py"}))


def refusal(text: str) -> str:
    with pytest.raises(InferenceError) as caught:
        check_tensors(normalised(text))
    assert caught.value.code is Code.INVALID_ARG
    return caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        'backend: "python" platform: "tensorrt_plan"',
        "max_batch_size: 4 dynamic_batching { preferred_batch_size: 4 priority_levels: 2 "
        "default_priority_level: 2 priority_queue_policy { key: 2 value { } } }",
        "max_batch_size: 4 dynamic_batching { preserve_ordering: true priority_levels: 1 "
        "default_priority_level: 1 default_queue_policy { timeout_action: DELAY } }",
        "response_cache { } sequence_batching { }",
        'model_metrics { metric_control { metric_identifier { family: "another" } '
        "histogram_options { buckets: 5 } } }",
        'input { name: "i" data_type: TYPE_FP32 dims: 1 }',
        'input { name: "i" data_type: TYPE_FP32 dims: 1 dims: -1 dims: 3 format: FORMAT_NCHW }',
        'max_batch_size: 1 input { name: "i" data_type: TYPE_FP32 dims: 1 reshape { } }',
        'input { name: "i" data_type: TYPE_FP32 dims: [ 2, 4, -1, 6 ] '
        "reshape { shape: [ 8, -1, 1, 6 ] } }",
    ],
)
def test_configs_that_triton_accepts_are_accepted(text: str) -> None:
    check_tensors(normalised(text))


# The texts below are what Triton 2.51 answered, except for the names of the models.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'name: "other"',
            "unexpected directory name 'm' for model 'other', directory name must equal model name",
        ),
        ("max_batch_size: -1", "'max_batch_size' must be non-negative value for m"),
        (
            "model_metrics { metric_control { } }",
            "metric control must specify 'metric_identifier'",
        ),
        (
            "model_metrics { metric_control { metric_identifier { } } }",
            "metric identifier must specify non-empty 'family'",
        ),
        (
            'model_metrics { metric_control { metric_identifier { family: "f" } } }',
            "metric control must specify 'histogram_options'",
        ),
        (
            'model_metrics { metric_control { metric_identifier { family: "f" } '
            "histogram_options { } } }",
            "histogram options must specify non-empty 'buckets'",
        ),
        (
            'backend: "onnxruntime" platform: "tensorrt_plan"',
            "unexpected 'platform' and 'backend' pair, got:tensorrt_plan, onnxruntime",
        ),
        (
            'backend: "tensorflow"',
            "unexpected 'platform' and 'backend' pair, got:, tensorflow",
        ),
        ('platform: "xyz"', "unexpected platform type 'xyz' for m"),
        ('platform: "libtorch"', "unexpected platform type 'libtorch' for m"),
        (
            'backend: "python" platform: "ensemble"',
            "Ensemble model 'm' must have platform type 'ensemble' and empty backend type",
        ),
        (
            'platform: "ensemble"',
            "ensemble scheduling must be set for ensemble m whose platform is ensemble",
        ),
        (
            "ensemble_scheduling { }",
            "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
        ),
        (
            "response_cache { enable: true } sequence_batching { }",
            "Response Cache does not currently support model m with sequence batching scheduler. "
            "Please disable the response cache.",
        ),
        (
            "response_cache { enable: true } model_transaction_policy { decoupled: true }",
            "Response Cache does not currently support model m with 'decoupled' transaction "
            "policy. Please disable the response cache.",
        ),
        (
            "parameters { key: 'replicas' value { string_value: '0' } }",
            "model 'm': parameter 'replicas' is '0', expected a number from 1 to 9999, or a range "
            "such as 0..8",
        ),
        (
            "instance_group { kind: KIND_CPU gpus: 0 }",
            "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
        ),
        (
            "instance_group { } instance_group { kind: KIND_GPU }",
            "instance group m_1 of model m has kind KIND_GPU but no GPUs are available",
        ),
    ],
)
def test_a_model_that_contradicts_itself_is_refused(text: str, message: str) -> None:
    assert refusal(text) == message


def test_a_model_without_a_known_backend_is_refused() -> None:
    message = refusal('default_model_filename: "other.py"')
    assert message == "must specify 'platform' or 'backend' for 'm'"


@pytest.mark.parametrize(
    ("batching", "message"),
    [
        ("preferred_batch_size: 0", "dynamic batching preferred size must be positive for m"),
        (
            "preferred_batch_size: [ 4, 5 ]",
            "dynamic batching preferred size must be <= max batch size for m",
        ),
        ("priority_levels: 2", "default priority level must be in range [1, 2] for m"),
        (
            "priority_levels: 2 default_priority_level: 3",
            "default priority level must be in range [1, 2] for m",
        ),
        (
            "priority_levels: 2 default_priority_level: 1 "
            "priority_queue_policy { key: 3 value { } }",
            "priority queue policy must have priority level in range [1, 2] for m",
        ),
        (
            "preserve_ordering: true priority_levels: 2 default_priority_level: 1",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            "preserve_ordering: true "
            "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 }",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true "
            "for m",
        ),
        (
            "preserve_ordering: true priority_levels: 1 default_priority_level: 1 "
            "priority_queue_policy { key: 1 value "
            "{ timeout_action: DELAY default_timeout_microseconds: 5 } }",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true "
            "for m",
        ),
    ],
)
def test_dynamic_batching_that_contradicts_itself_is_refused(batching: str, message: str) -> None:
    assert refusal(f"max_batch_size: 4 dynamic_batching {{ {batching} }}") == message


SIZES = "must be integer >= 1, or -1 to indicate a variable-size dimension"
SOUND_INPUT = ModelInput(name="T", data_type=DataType.TYPE_INT32, dims=(4,))
SOUND_OUTPUT = ModelOutput(name="T", data_type=DataType.TYPE_INT32, dims=(4,))


def tensor_refusal(config: ModelConfig) -> str:
    with pytest.raises(InferenceError) as caught:
        check_tensors(config)
    assert caught.value.code is Code.INVALID_ARG
    return caught.value.message


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": ""}, "{role} must specify 'name'"),
        ({"data_type": DataType.TYPE_INVALID}, "{role} 'T' must specify 'data_type'"),
        ({"dims": ()}, "{role} 'T' must specify 'dims'"),
        ({"dims": (0,)}, f"{{role}} 'T' dimension {SIZES}"),
        ({"dims": (2, -2)}, f"{{role}} 'T' dimension {SIZES}"),
        ({"is_shape_tensor": True}, "shape tensors are only supported for TensorRT platform"),
        (
            {"is_non_linear_format_io": True},
            "Non-linear IO format is only supported for the TensorRT platform",
        ),
    ],
)
def test_a_tensor_that_is_incomplete_is_refused(change: dict[str, object], problem: str) -> None:
    wrong_input = replace(SOUND_INPUT, **change)  # type: ignore[arg-type]
    wrong_output = replace(SOUND_OUTPUT, **change)  # type: ignore[arg-type]
    assert (
        tensor_refusal(ModelConfig(name="m", input=(SOUND_INPUT, wrong_input)))
        == f"{problem.format(role='model input')} for m"
    )
    assert (
        tensor_refusal(ModelConfig(name="m", input=(SOUND_INPUT,), output=(wrong_output,)))
        == f"{problem.format(role='model output')} for m"
    )


@pytest.mark.parametrize(
    ("dims", "shape", "problem"),
    [
        ((1,), (0,), f"reshape dimensions {SIZES}"),
        ((4,), (3,), "has different size for dims and reshape"),
        ((4,), (), "has different size for dims and reshape"),
        ((-1,), (4,), "has different size for dims and reshape"),
        ((-1,), (), "has different size for dims and reshape"),
        (
            (-1, -1),
            (-1,),
            "has different number of variable-size dimensions for dims and reshape",
        ),
        ((-1, 4), (2, -1), "has different size for dims and reshape"),
    ],
)
def test_a_reshape_that_does_not_fit_is_refused(
    dims: tuple[int, ...], shape: tuple[int, ...], problem: str
) -> None:
    wrong = replace(SOUND_OUTPUT, dims=dims, reshape=TensorReshape(shape=shape))
    config = ModelConfig(name="m", max_batch_size=1, output=(wrong,))
    assert tensor_refusal(config) == f"model output 'T' {problem} for m"


def test_a_scalar_needs_a_model_that_batches() -> None:
    scalar = replace(SOUND_INPUT, dims=(1,), reshape=TensorReshape())
    check_tensors(ModelConfig(name="m", max_batch_size=1, input=(scalar,)))
    assert tensor_refusal(ModelConfig(name="m", input=(scalar,))) == (
        "model input 'T' cannot have empty reshape for non-batching model as scalar tensors are "
        "not supported for m"
    )


def test_an_image_has_three_dimensions() -> None:
    assert (
        refusal('input { name: "i" data_type: TYPE_FP32 dims: 1 format: FORMAT_NHWC }')
        == "model input NHWC/NCHW require 3 dims for m"
    )


def test_a_tensorrt_model_may_have_its_special_tensors() -> None:
    special = replace(SOUND_INPUT, is_shape_tensor=True, is_non_linear_format_io=True)
    config = ModelConfig(name="m", platform="tensorrt_plan")
    check_tensors(replace(config, input=(replace(special, dims=(1, 2, 3)),)))
    assert tensor_refusal(replace(config, input=(special,))) == (
        "Non-linear IO format input requires 3 dims for m"
    )
