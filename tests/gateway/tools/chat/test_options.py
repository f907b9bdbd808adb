"""Sampling parameters of the user, as values for the server."""

import pytest

from gateway.tools.chat.options import SamplingParameters
from gateway.tools.chat.server import ChatError, Question, Refused
from tests.gateway.tools.chat.played import chat_model


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("0.5", 0.5),
        ("12", 12),
        ("true", True),
        ('["a", "b"]', ["a", "b"]),
        ("plain text", "plain text"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_what_is_json_is_read_as_json_and_the_rest_is_text(typed: str, value: object) -> None:
    sampling = SamplingParameters({})
    sampling.set("x", typed)
    assert sampling.values == {"x": value}


def test_what_is_unset_is_the_models_own() -> None:
    sampling = SamplingParameters({"temperature": 0})
    assert sampling.unset("temperature")
    assert not sampling.unset("temperature")
    assert sampling.values == {}


def test_null_is_a_value_that_can_be_unset() -> None:
    sampling = SamplingParameters({})
    sampling.set("max_tokens", "null")
    assert sampling.unset("max_tokens")
    assert sampling.values == {}


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_several_answers_at_once_are_refused(name: str) -> None:
    sampling = SamplingParameters({})
    sampling.set(name, "1")
    with pytest.raises(ChatError, match=f"'{name}' is 2"):
        sampling.set(name, "2")
    assert sampling.values == {name: 1}


def question(*inputs: str, platform: str = "python", **sampling: object) -> Question:
    return Question(chat_model("m", platform, *inputs), [], sampling)


def test_a_model_with_the_input_gets_it_as_json() -> None:
    asked = question("sampling_parameters", stop=["a"])
    assert asked.inputs()["sampling_parameters"] == '{"stop": ["a"]}'
    assert asked.parameters() == {}


def test_a_model_without_the_input_gets_parameters() -> None:
    asked = question(temperature=0.5, seed=7)
    assert asked.inputs().keys() == {"messages"}
    assert asked.parameters() == {"temperature": 0.5, "seed": 7}


@pytest.mark.parametrize("value", [["a"], {"a": 1}, None, 2**63])
def test_what_no_parameter_can_hold_is_refused_and_named(value: object) -> None:
    with pytest.raises(Refused, match=r"'stop' is .*no input 'sampling_parameters'"):
        question(stop=value).parameters()


def test_only_what_a_model_has_is_asked_of_it() -> None:
    known = question("stream", "return_num_output_tokens").inputs()
    assert known == {"messages": "[]", "stream": True, "return_num_output_tokens": True}


def test_vllm_gets_no_limit_of_tokens_by_default() -> None:
    unsaid = question("sampling_parameters", platform="vllm")
    assert unsaid.inputs()["sampling_parameters"] == '{"max_tokens": null}'
    said = question("sampling_parameters", platform="vllm", max_tokens=5)
    assert said.inputs()["sampling_parameters"] == '{"max_tokens": 5}'
    assert "sampling_parameters" not in question("sampling_parameters").inputs()
