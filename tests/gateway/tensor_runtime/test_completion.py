"""Tensors that a config lists are kept, or filled from the model."""

from dataclasses import replace

import pytest

from gateway.config import ModelConfig, ModelInput, ModelOutput, TensorReshape
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.completion import ListedTensors, complete
from gateway.tensor_runtime.signature import ModelSignature, ModelTensor

INT32 = DataType.TYPE_INT32
MODEL = ModelSignature(
    {
        "a": ModelTensor("a", "int", INT32, (-1, 2)),
        "b": ModelTensor("b", "int", INT32, (-1,)),
        "any": ModelTensor("any", "int", INT32, None),
    },
    {
        "y": ModelTensor("y", "int", INT32, (-1, 3)),
        "z": ModelTensor("z", "map", None, (-1,)),
    },
)
ANY = ModelInput(name="any", dims=(7,))
LISTED = ModelConfig(name="m", input=(ANY,), output=(ModelOutput(name="y"),))


def filled(config: ModelConfig) -> ModelConfig:
    return complete(config, MODEL, 4, ListedTensors.FILLED)


def test_listed_tensors_are_kept_by_default() -> None:
    found = complete(LISTED, MODEL, 4)
    assert (found.input, found.output) == (LISTED.input, LISTED.output)


def test_listed_tensors_are_filled_and_missing_inputs_added() -> None:
    found = filled(LISTED)
    assert found.input == (
        replace(ANY, data_type=INT32),
        ModelInput(name="a", data_type=INT32, dims=(2,)),
        ModelInput(name="b", data_type=INT32, dims=(1,), reshape=TensorReshape()),
    )
    assert found.output == (ModelOutput(name="y", data_type=INT32, dims=(3,)),)


def test_what_a_listed_tensor_has_is_kept() -> None:
    own = ModelInput(name="a", data_type=DataType.TYPE_FP32, dims=(9,))
    found = filled(replace(LISTED, input=(own, ANY)))
    assert found.input[0] == own


def test_a_listed_tensor_that_the_model_lacks_is_kept_for_the_checks() -> None:
    unknown = ModelOutput(name="other")
    assert filled(replace(LISTED, output=(unknown,))).output == (unknown,)


def test_all_outputs_are_added_if_none_is_listed() -> None:
    with pytest.raises(InferenceError, match="'z' of the model is a map"):
        filled(replace(LISTED, output=()))


@pytest.mark.parametrize("listed", [(), (replace(ANY, dims=()),)])
def test_a_tensor_of_unknown_rank_needs_dims(listed: tuple[ModelInput, ...]) -> None:
    with pytest.raises(InferenceError) as caught:
        filled(replace(LISTED, input=listed))
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (
        "unable to autofill for 'm': the rank of model tensor 'any' is 0 and dimensions are not "
        "defined"
    )
