"""A config declares its padded sequences in parameters."""

from dataclasses import replace

import pytest

from gateway.batches.padding import Padding
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError

ENCODER = ModelConfig(
    name="encoder",
    max_batch_size=8,
    input=(
        ModelInput(name="ids", data_type=DataType.TYPE_INT64, dims=(-1,)),
        ModelInput(name="extra", data_type=DataType.TYPE_INT64, dims=(-1,), optional=True),
        ModelInput(name="flat", data_type=DataType.TYPE_INT64, dims=(-1,), allow_ragged_batch=True),
        ModelInput(name="fixed", data_type=DataType.TYPE_INT64, dims=(4,)),
    ),
    output=(
        ModelOutput(name="states", data_type=DataType.TYPE_FP32, dims=(-1, 384)),
        ModelOutput(name="pooled", data_type=DataType.TYPE_FP32, dims=(384,)),
    ),
)


def with_parameters(**parameters: str) -> ModelConfig:
    return replace(ENCODER, parameters=parameters)


def test_a_config_that_declares_nothing_has_no_padding() -> None:
    assert Padding.read(with_parameters(padded_outputs="nonsense")) == Padding()


def test_outputs_with_a_length_are_cut_unless_the_config_says_which() -> None:
    found = Padding.read(with_parameters(padded_inputs='{"ids": 7}'))
    assert (dict(found.inputs), found.outputs, found.token_budget) == ({"ids": 7}, {"states"}, 0)
    none = Padding.read(with_parameters(padded_inputs='{"ids": 0}', padded_outputs="[]"))
    assert none.outputs == frozenset()


def test_a_budget_is_a_number_of_tokens() -> None:
    found = Padding.read(with_parameters(padded_inputs='{"ids": 0}', batch_token_budget="1024"))
    assert found.token_budget == 1024


def test_the_longest_is_a_number_of_tokens() -> None:
    found = Padding.read(with_parameters(padded_inputs='{"ids": 0}', max_padded_length="512"))
    assert found.max_length == 512


@pytest.mark.parametrize(
    "parameters",
    [
        {"padded_inputs": "ids"},
        {"padded_inputs": '["ids"]'},
        {"padded_inputs": '{"ids": "0"}'},
        {"padded_inputs": '{"ids": true}'},
        {"padded_inputs": "[" * 100_000},
        {"padded_inputs": '{"fixed": 0}'},
        {"padded_inputs": '{"unknown": 0}'},
        {"padded_inputs": '{"extra": 0}'},
        {"padded_inputs": '{"flat": 0}'},
        {"padded_inputs": '{"ids": 0}', "padded_outputs": '"states"'},
        {"padded_inputs": '{"ids": 0}', "padded_outputs": '["unknown"]'},
        {"padded_inputs": '{"ids": 0}', "padded_outputs": '["pooled"]'},
        {"padded_inputs": '{"ids": 0}', "batch_token_budget": "0"},
        {"padded_inputs": '{"ids": 0}', "batch_token_budget": "-1"},
        {"padded_inputs": '{"ids": 0}', "batch_token_budget": "many"},
        {"padded_inputs": '{"ids": 0}', "batch_token_budget": ""},
        {"padded_inputs": '{"ids": 0}', "batch_token_budget": "9" * 5000},
        {"padded_inputs": '{"ids": 0}', "max_padded_length": "0"},
        {"padded_inputs": '{"ids": 0}', "max_padded_length": "many"},
    ],
    ids=str,
)
def test_an_invalid_parameter_is_refused(parameters: dict[str, str]) -> None:
    with pytest.raises(InferenceError) as caught:
        Padding.read(with_parameters(**parameters))
    assert caught.value.code is Code.INVALID_ARG
    assert f"model 'encoder': parameter '{list(parameters)[-1]}'" in caught.value.message


def test_a_model_that_does_not_batch_has_nothing_to_pad() -> None:
    with pytest.raises(InferenceError, match="max_batch_size"):
        Padding.read(replace(with_parameters(padded_inputs='{"ids": 0}'), max_batch_size=0))
