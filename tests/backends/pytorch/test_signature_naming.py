"""Names of a configuration find their arguments and results by Triton's rules."""

import pytest

from backends.pytorch.signature import TensorSlot, place_inputs, place_outputs
from gateway.config import BatchInput, ModelConfig, ModelInput, ModelOutput
from gateway.config.scheduling import ControlInput, SequenceBatching, State
from gateway.errors import Code, InferenceError

X_AND_Y = (TensorSlot(names=("x",)), TensorSlot(names=("y",)))


def config(inputs: str, outputs: str = "z") -> ModelConfig:
    return ModelConfig(
        name="m",
        input=tuple(ModelInput(name=name) for name in inputs.split()),
        output=tuple(ModelOutput(name=name) for name in outputs.split()),
    )


@pytest.mark.parametrize(
    ("names", "places"),
    [
        ("x y", {"x": 0, "y": 1}),
        ("y x", {"y": 0 + 1, "x": 0}),
        ("INPUT__1 INPUT__0", {"INPUT__1": 1, "INPUT__0": 0}),
        ("any__0 other__1", {"any__0": 0, "other__1": 1}),
        ("b a", {"b": 0, "a": 1}),
        ("x INPUT__0", {"x": 0, "INPUT__0": 1}),
        ("a__x b__1", {"a__x": 0, "b__1": 1}),
    ],
)
def test_inputs_are_arguments_else_indexed_else_in_order(
    names: str, places: dict[str, int]
) -> None:
    assert place_inputs(config(names), X_AND_Y) == places


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            "x",
            "unable to load model 'm', configuration expects 1 inputs, model provides 2",
        ),
        (
            "x y z",
            "unable to load model 'm', configuration expects 3 inputs, model provides 2",
        ),
        ("a__0 b__2", "input 'b__2' refers to argument 2, expected one of 0 to 1"),
        ("a__1 b__1", "input 'b__1' refers to argument 1 as input 'a__1' does"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(names: str, text: str) -> None:
    with pytest.raises(InferenceError) as refused:
        place_inputs(config(names), X_AND_Y)
    assert refused.value.code is Code.INVALID_ARG
    assert text in refused.value.message


def test_an_argument_without_default_needs_an_input() -> None:
    slots = (TensorSlot(names=("x",)), TensorSlot(names=("y",), optional=True))
    assert place_inputs(config("x"), slots) == {"x": 0}
    with pytest.raises(InferenceError, match=r"no input .* is for argument 0 \('x'\), found y"):
        place_inputs(config("y"), slots)


def test_inputs_that_the_server_adds_to_a_batch_count() -> None:
    derived = ModelConfig(
        name="m",
        input=(ModelInput(name="a__0"),),
        batch_input=(BatchInput(target_name=("b__1",)),),
        sequence_batching=SequenceBatching(
            control_input=(ControlInput(name="start__2"),),
            state=(State(input_name="state__3", output_name="state__1"),),
        ),
        output=(ModelOutput(name="out__0"),),
    )
    slots = tuple(TensorSlot(names=(name,)) for name in "wxyz")
    assert place_inputs(derived, slots) == {"a__0": 0, "b__1": 1, "start__2": 2, "state__3": 3}
    assert place_outputs(derived, None) == {"out__0": 0, "state__1": 1}


@pytest.mark.parametrize(
    ("names", "places"),
    [
        ("OUTPUT__1 OUTPUT__0", {"OUTPUT__1": 1, "OUTPUT__0": 0}),
        ("sum", {"sum": 1}),
        ("first second", {"first": 0, "second": 1}),
    ],
)
def test_outputs_are_results_by_name_else_indexed_else_in_order(
    names: str, places: dict[str, int]
) -> None:
    slots = (TensorSlot(names=("difference",)), TensorSlot(names=("sum",)))
    assert place_outputs(config("x", names), slots) == places


def test_an_output_that_the_model_does_not_have_is_refused_with_tritons_text() -> None:
    with pytest.raises(InferenceError) as refused:
        place_outputs(config("x", "OUTPUT__2"), (TensorSlot(names=("OUTPUT__0",)),))
    assert refused.value.message == (
        "The output OUTPUT__2 in the model configuration refers to an output index which doesn't "
        "exist. This model has 1 outputs"
    )
