"""Configs and models that contradict each other, in Triton's words."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from gateway.config import BatchInput, ModelConfig, ModelInput, ModelOutput, TensorReshape
from gateway.config.data_type import DataType
from gateway.config.scheduling import Control, ControlInput, ControlKind, SequenceBatching, State
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.checks import CheckRules, check
from gateway.tensor_runtime.signature import ModelSignature, ModelTensor

FLOAT = "tensor(float)"


def tensors(**dims: tuple[int, ...]) -> Mapping[str, ModelTensor]:
    return {name: ModelTensor(name, FLOAT, DataType.TYPE_FP32, each) for name, each in dims.items()}


def model(inputs: Mapping[str, ModelTensor], **outputs: tuple[int, ...]) -> ModelSignature:
    return ModelSignature(inputs, tensors(**outputs), {})


X = ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=(16,))
Y = ModelOutput(name="y", data_type=DataType.TYPE_FP32, dims=(16,))
CONFIG = ModelConfig(name="m", max_batch_size=4, input=(X,), output=(Y,))
MODEL = model(tensors(x=(-1, 16)), y=(-1, 16))


def problem(config: ModelConfig, signature: ModelSignature = MODEL) -> str:
    with pytest.raises(InferenceError) as caught:
        check(config, signature)
    assert caught.value.code is Code.INVALID_ARG
    return caught.value.message


def test_a_config_that_fits_is_accepted() -> None:
    check(CONFIG, MODEL)
    check(replace(CONFIG, max_batch_size=0, input=(replace(X, dims=(3, 16)),)), unbatched())


def unbatched() -> ModelSignature:
    return model(tensors(x=(-1, 16)), y=(16,))


def test_outputs_may_be_omitted() -> None:
    check(CONFIG, model(tensors(x=(-1, 16)), y=(-1, 16), z=(-1, 3)))


@pytest.mark.parametrize(("dims", "found"), [((-1,), (-1, 16)), ((16,), (-1, -1))])
def test_any_size_on_either_side_fits(dims: tuple[int, ...], found: tuple[int, ...]) -> None:
    config = replace(CONFIG, input=(replace(X, dims=dims),), output=(replace(Y, dims=dims),))
    check(config, model(tensors(x=found), y=found))


def test_inputs_are_counted() -> None:
    assert problem(CONFIG, model(tensors(x=(-1, 16), w=(-1, 16)), y=(-1, 16))) == (
        "unable to load model 'm', configuration expects 1 inputs, model provides 2"
    )


def test_names_must_be_the_models() -> None:
    assert problem(replace(CONFIG, input=(replace(X, name="z"),))) == (
        "unexpected inference input 'z', allowed inputs are: x"
    )
    many = model(tensors(x=(-1, 16)), y=(-1, 16), b=(1,), a=(1,))
    assert problem(replace(CONFIG, output=(replace(Y, name="z"),)), many) == (
        "unexpected inference output 'z', allowed outputs are: a, b, y"
    )


def test_datatypes_must_be_the_models() -> None:
    assert problem(replace(CONFIG, input=(replace(X, data_type=DataType.TYPE_INT8),))) == (
        "unable to load model 'm', configuration expects datatype TYPE_INT8 for input 'x', model "
        "provides TYPE_FP32"
    )
    assert problem(replace(CONFIG, output=(replace(Y, data_type=DataType.TYPE_BF16),))) == (
        "unable to load model 'm', configuration expects datatype TYPE_BF16 for output 'y', model "
        "provides TYPE_FP32"
    )


def test_the_first_dim_of_a_batching_model_must_be_free() -> None:
    for dims in ((1, 16), ()):
        assert problem(CONFIG, model(tensors(x=dims), y=(-1, 16))) == (
            "model 'm', tensor 'x': for the model to support batching the shape should have at "
            "least 1 dimension and the first dimension must be -1; but shape expected by the model "
            f"is [{','.join(map(str, dims))}]"
        )


@pytest.mark.parametrize("dims", [(8,), (16, 1)])
def test_shapes_with_a_batch_must_agree(dims: tuple[int, ...]) -> None:
    shown = ",".join(map(str, dims))
    assert problem(replace(CONFIG, output=(replace(Y, dims=dims),))) == (
        "model 'm', tensor 'y': the model expects 2 dimensions (shape [-1,16]) but the model "
        f"configuration specifies {1 + len(dims)} dimensions (an initial batch dimension because "
        "max_batch_size > 0 followed by the explicit tensor shape, making complete shape "
        f"[-1,{shown}])"
    )


def test_shapes_without_a_batch_must_agree() -> None:
    assert problem(replace(CONFIG, max_batch_size=0)) == (
        "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,16]) but the model "
        "configuration specifies 1 dimensions (shape [16])"
    )


def test_a_model_sees_reshaped_tensors() -> None:
    shaped = replace(X, dims=(4,), reshape=TensorReshape(shape=(2, 2)))
    config = replace(CONFIG, input=(shaped,))
    check(config, model(tensors(x=(-1, 2, 2)), y=(-1, 16)))
    assert "making complete shape [-1,2,2]" in problem(config)


def test_a_ragged_input_is_flat_in_the_model() -> None:
    config = replace(CONFIG, input=(replace(X, allow_ragged_batch=True),))
    check(config, model(tensors(x=(-1,)), y=(-1, 16)))
    assert problem(config) == (
        "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,16]) but the model "
        "configuration specifies 1 dimensions (shape [-1])"
    )


def test_derived_batch_inputs_are_inputs_of_the_model() -> None:
    told = BatchInput(target_name=("t",), data_type=DataType.TYPE_FP32, source_input=("x",))
    config = replace(CONFIG, batch_input=(told,))
    check(config, model(tensors(x=(-1, 16), t=(-1,)), y=(-1, 16)))
    assert problem(config) == (
        "unable to load model 'm', configuration expects 2 inputs, model provides 1"
    )
    assert problem(config, model(tensors(x=(-1, 16), u=(-1,)), y=(-1, 16))) == (
        "unexpected inference input 't', allowed inputs are: u, x"
    )
    other = replace(config, batch_input=(replace(told, data_type=DataType.TYPE_INT32),))
    assert "datatype TYPE_INT32 for input 't'" in problem(
        other, model(tensors(x=(-1, 16), t=(-1,)), y=(-1, 16))
    )


def test_sequence_controls_and_states_are_inputs_of_the_model() -> None:
    start = Control(kind=ControlKind.CONTROL_SEQUENCE_START, fp32_false_true=(0.0, 1.0))
    kept = State(input_name="s", output_name="t", data_type=DataType.TYPE_FP32, dims=(1,))
    batching = SequenceBatching(
        control_input=(ControlInput(name="START", control=(start,)),), state=(kept,)
    )
    config = replace(CONFIG, sequence_batching=batching)
    inputs = tensors(x=(-1, 16), START=(-1, 1), s=(-1, 1))
    check(config, model(inputs, y=(-1, 16), t=(-1, 1)))
    assert problem(config, model(inputs, y=(-1, 16))) == (
        "unexpected inference output 't', allowed outputs are: y"
    )
    assert "configuration specifies 2 dimensions" in problem(
        config, model(inputs, y=(-1, 16), t=(-1, 1, 1))
    )
    number = replace(start, fp32_false_true=(), int32_false_true=(0, 1))
    controls = (ControlInput(name="START", control=(number,)),)
    other = replace(config, sequence_batching=replace(batching, control_input=controls))
    assert "datatype TYPE_INT32 for input 'START'" in problem(
        other, model(inputs, y=(-1, 16), t=(-1, 1))
    )
    assert problem(config) == (
        "configuration specified sequence control 'START', but model does not provide that input"
    )


def test_an_initializer_may_be_an_optional_input() -> None:
    optional = replace(X, name="w", optional=True)
    config = replace(CONFIG, max_batch_size=0, input=(X, optional))
    found = ModelSignature(tensors(x=(16,)), tensors(y=(16,)), tensors(w=(16,)))
    check(config, found)
    check(replace(config, input=(X,)), found)
    assert "datatype TYPE_INT8 for input 'w'" in problem(
        replace(config, input=(X, replace(optional, data_type=DataType.TYPE_INT8))), found
    )


def test_optional_inputs_of_a_model_that_batches_are_refused() -> None:
    assert problem(replace(CONFIG, input=(replace(X, optional=True),))) == (
        "unable to load model 'm', optional input 'x' is not supported for models that support "
        "batching"
    )
    ragged = replace(X, optional=True, allow_ragged_batch=True)
    assert "cannot allow ragged batches" in problem(
        replace(CONFIG, max_batch_size=0, input=(ragged,))
    )


def test_an_output_that_is_no_tensor_matters_only_if_it_is_served() -> None:
    found = replace(
        MODEL, outputs={**MODEL.outputs, "s": ModelTensor("s", "seq(tensor(float))", None, ())}
    )
    check(CONFIG, found)
    with pytest.raises(InferenceError, match=r"'s' of the model is a seq\(tensor\(float\)\)"):
        check(replace(CONFIG, output=(Y, replace(Y, name="s"))), found)


# Rules of other runtimes than ONNX Runtime.


def test_spare_inputs_of_the_model_may_be_allowed() -> None:
    spare = model(tensors(x=(-1, 16), w=(-1, 16)), y=(-1, 16))
    check(CONFIG, spare, CheckRules(spare_inputs=True))
    more = replace(CONFIG, input=(X, replace(X, name="v"), replace(X, name="w")))
    with pytest.raises(InferenceError, match="expects 3 inputs, model provides at most 2"):
        check(more, spare, CheckRules(spare_inputs=True))


def test_dims_of_outputs_may_have_to_be_equal() -> None:
    exact = CheckRules(exact_outputs=True)
    check(CONFIG, MODEL, exact)
    with pytest.raises(InferenceError, match=r"the model computes shape \[-1,-1\] but"):
        check(CONFIG, model(tensors(x=(-1, 16)), y=(-1, -1)), exact)


@pytest.mark.parametrize("dims", [None, ()])
def test_tensors_without_dims_may_have_those_of_the_config(dims: tuple[int, ...] | None) -> None:
    tensor = {name: ModelTensor(name, FLOAT, DataType.TYPE_FP32, dims) for name in "xy"}
    signature = ModelSignature({"x": tensor["x"]}, {"y": tensor["y"]})
    check(CONFIG, signature, CheckRules(free_ranks=True))
    with pytest.raises(InferenceError, match="batch"):
        check(CONFIG, signature)
