"""The text contract of LLM models, as Triton's vLLM backend has it."""

import json
from typing import Any

import numpy as np
import pytest

from gateway.errors import Code, InferenceError
from gateway.generation import (
    INPUTS,
    OUTPUTS,
    Delta,
    GenerationRequest,
    OptionalOutputs,
    Transcript,
    read_generation,
)
from gateway.messages import InferRequest, InferResponse, Usage
from gateway.tensor import Datatype, Tensor, array_tensor, text_tensor

ALL = OptionalOutputs(
    finish_reason=True,
    cumulative_logprob=True,
    logprobs=True,
    num_input_tokens=True,
    num_output_tokens=True,
)


def request(parameters: dict[str, Any] | None = None, **inputs: str | bytes | bool) -> InferRequest:
    """A request with one element per input: BOOL for booleans, BYTES for the rest."""
    return InferRequest(
        model="llama",
        inputs=tuple(tensor(name, value) for name, value in inputs.items()),
        parameters=parameters or {},
    )


def tensor(name: str, value: str | bytes | bool) -> Tensor:
    if isinstance(value, bool):
        return array_tensor(name, Datatype.BOOL, np.array([value]))
    if isinstance(value, bytes):
        return Tensor(name, Datatype.BYTES, (1,), (value,))
    return text_tensor(name, [value])


def refusal(asked: InferRequest) -> str:
    with pytest.raises(InferenceError) as caught:
        read_generation(asked)
    assert caught.value.code is Code.INVALID_ARG
    return caught.value.message


def values(response: InferResponse) -> dict[str, list[Any]]:
    found = {output.name: output.array().tolist() for output in response.outputs}
    return {
        name: [v.decode() if isinstance(v, bytes) else v for v in row]
        for name, row in found.items()
    }


class TestReading:
    @pytest.mark.parametrize(
        ("flags", "stream", "echo"),
        [
            ({}, False, True),
            ({"exclude_input_in_output": False}, False, True),
            ({"exclude_input_in_output": True}, False, False),
            ({"stream": False}, False, True),
            ({"stream": True}, True, False),
            ({"stream": True, "exclude_input_in_output": True}, True, False),
        ],
    )
    def test_the_prompt_comes_first_unless_excluded_or_streaming(
        self, flags: dict[str, bool], stream: bool, echo: bool
    ) -> None:
        asked = read_generation(request(text_input="hi", **flags))
        assert (asked.text, asked.stream, asked.echo) == ("hi", stream, echo)

    def test_streaming_cannot_include_the_prompt(self) -> None:
        said = refusal(request(text_input="hi", stream=True, exclude_input_in_output=False))
        assert said == "When streaming, `exclude_input_in_output` = False is not allowed."

    def test_a_conversation_is_repeated_only_on_demand(self) -> None:
        messages = json.dumps([{"role": "user", "content": "hi"}])
        assert not read_generation(request(messages=messages)).echo
        assert read_generation(request(messages=messages, exclude_input_in_output=False)).echo

    def test_a_text_and_a_conversation_exclude_each_other(self) -> None:
        assert "got both" in refusal(request(text_input="hi", messages="[]"))
        assert "got neither" in refusal(request(stream=True))

    def test_an_embedding_request_needs_no_prompt_and_overrides_one(self) -> None:
        asked = read_generation(request(text_input="hi", embedding_request='{"input": "x"}'))
        assert (asked.embedding, asked.text) == ({"input": "x"}, None)

    def test_text_of_any_script_is_read(self) -> None:
        assert read_generation(request(text_input="naïve 日本 \0 🙂")).text == "naïve 日本 \0 🙂"

    @pytest.mark.parametrize(
        ("inputs", "said"),
        [
            ({"text_input": b"a\xff"}, "input 'text_input' is not valid UTF-8: invalid start byte"),
            ({"messages": "[1,,2]"}, "input 'messages' is not valid JSON"),
            ({"messages": "{}"}, "a list is expected"),
            ({"text_input": "a", "sampling_parameters": "[]"}, "an object is expected"),
            ({"text_input": "a", "sampling_parameters": '{"n":}'}, "line 1 column 6"),
            ({"text_input": "a", "sampling_parameters": '{"n":NaN}'}, "not valid JSON"),
            ({"text_input": "a", "sampling_parameters": "[" * 9000}, "depth limit"),
            ({"embedding_request": "[]"}, "an object is expected"),
        ],
    )
    def test_what_cannot_be_read_is_refused_by_name(self, inputs: Any, said: str) -> None:
        assert said in refusal(request(**inputs))

    def test_an_input_has_one_element(self) -> None:
        two = InferRequest(model="llama", inputs=(text_tensor("text_input", ["a", "b"]),))
        assert refusal(two) == "input 'text_input' has 2 elements, expected 1"

    def test_a_text_without_a_shape_is_one_element(self) -> None:
        scalar = Tensor("text_input", Datatype.BYTES, (), (b"hi",))
        assert read_generation(InferRequest(model="llama", inputs=(scalar,))).text == "hi"

    def test_every_image_is_kept_as_it_came(self) -> None:
        images = Tensor("image", Datatype.BYTES, (2,), (b"QQ==", b"Qg=="))
        asked = InferRequest(model="llama", inputs=(text_tensor("text_input", ["a"]), images))
        assert read_generation(asked).images == (b"QQ==", b"Qg==")

    def test_each_optional_output_has_its_flag(self) -> None:
        flags = {f"return_{name}": True for name in OptionalOutputs.__slots__}
        assert read_generation(request(text_input="a", **flags)).optional == ALL
        off = dict.fromkeys(flags, False)
        assert read_generation(request(text_input="a", **off)).optional == OptionalOutputs()


class TestSampling:
    def test_parameters_say_how_to_sample(self) -> None:
        given = {"max_tokens": 3, "stop": ["a"], "id": "x"}
        asked = read_generation(request(given, text_input="a"))
        assert asked.sampling == {"max_tokens": 3, "stop": ["a"]}

    def test_the_tensor_replaces_the_parameters(self) -> None:
        asked = read_generation(
            request({"max_tokens": 3}, text_input="a", sampling_parameters='{"n": "2"}')
        )
        assert asked.sampling == {"n": "2"}

    def test_an_empty_object_replaces_them_as_well(self) -> None:
        asked = read_generation(
            request({"max_tokens": 3}, text_input="a", sampling_parameters="{}")
        )
        assert asked.sampling == {}


class TestTranscript:
    def test_a_response_is_one_text_and_what_it_cost(self) -> None:
        transcript = Transcript(GenerationRequest(text="hi", stream=True))
        first = transcript.respond([Delta(" a", 2)], 7, final=False)
        last = transcript.respond([Delta(" b", 1, finish_reason="stop")], 7, final=True)
        assert [values(each) for each in (first, last)] == [
            {"text_output": [" a"]},
            {"text_output": [" b"]},
        ]
        assert (first.final, last.final) == (False, True)
        assert first.usage == Usage(prompt_tokens=7, completion_tokens=2)
        assert last.usage == Usage(prompt_tokens=0, completion_tokens=1, finish_reason="stop")

    def test_cached_tokens_are_those_of_the_first_response(self) -> None:
        transcript = Transcript(GenerationRequest(text="hi", stream=True))
        found = [
            transcript.respond([Delta("a", 1)], 7, final=False, cached_tokens=4).usage
            for _ in range(2)
        ]
        assert [each and each.cached_tokens for each in found] == [4, None]

    def test_an_echo_precedes_each_sequence(self) -> None:
        transcript = Transcript(GenerationRequest(text="hi", echo=True), 2, "hi")
        deltas = [Delta(" b", 1, 1, "stop"), Delta(" a", 1, 0, "stop")]
        response = transcript.respond(deltas, 1, final=True)
        assert values(response) == {"text_output": ["hi a", "hi b"]}

    def test_every_optional_output_comes_when_asked_for(self) -> None:
        transcript = Transcript(GenerationRequest(text="hi", optional=ALL))
        response = transcript.respond([Delta("a", 2, 0, None, -1.5, '[{"5":{}}]')], 7, final=False)
        assert values(response) == {
            "text_output": ["a"],
            "finish_reason": ["None"],
            "cumulative_logprob": [-1.5],
            "logprobs": ['[{"5":{}}]'],
            "num_input_tokens": [7],
            "num_output_tokens": [2],
        }

    @pytest.mark.parametrize("name", OptionalOutputs.__slots__)
    def test_an_optional_output_comes_alone(self, name: str) -> None:
        asked = GenerationRequest(text="hi", optional=OptionalOutputs(**{name: True}))
        response = Transcript(asked).respond([Delta("a", 1)], 1, final=True)
        assert [output.name for output in response.outputs] == ["text_output", name]

    def test_sequences_keep_their_places_when_only_some_advance(self) -> None:
        transcript = Transcript(GenerationRequest(text="hi", optional=ALL), 2)
        first = transcript.respond([Delta("a", 1, 1, "stop", -1.0, "[{}]")], 5, final=False)
        last = transcript.respond([Delta("b", 3, 0, "length", -2.0, "[{},{},{}]")], 5, final=True)
        assert values(first) == {
            "text_output": ["", "a"],
            "finish_reason": ["None", "stop"],
            "cumulative_logprob": [0.0, -1.0],
            "logprobs": ["null", "[{}]"],
            "num_input_tokens": [5],
            "num_output_tokens": [0, 1],
        }
        assert values(last) == {
            "text_output": ["b", ""],
            "finish_reason": ["length", "stop"],
            "cumulative_logprob": [-2.0, -1.0],
            "logprobs": ["[{},{},{}]", "[]"],
            "num_input_tokens": [5],
            "num_output_tokens": [3, 0],
        }
        assert (last.usage or Usage()).completion_tokens == 3


def test_outputs_have_the_datatypes_of_the_contract() -> None:
    transcript = Transcript(GenerationRequest(text="hi", optional=ALL))
    response = transcript.respond([Delta("a", 1)], 1, final=True)
    *declared_outputs, of_openai = OUTPUTS
    declared = {output.name: output.datatype for output in declared_outputs}
    assert (of_openai.name, of_openai.datatype) == ("openai_response", "BYTES")
    assert {output.name: output.datatype for output in response.outputs} == declared
    assert OUTPUTS[0].name == "text_output"


def test_every_input_is_optional_and_has_the_contracts_datatype() -> None:
    assert all(each.optional for each in INPUTS)
    kinds = {each.name: str(each.datatype) for each in INPUTS}
    flags = {
        "stream",
        "exclude_input_in_output",
        *(f"return_{n}" for n in OptionalOutputs.__slots__),
    }
    texts = {"text_input", "messages", "image", "sampling_parameters", "embedding_request"}
    texts |= {"openai_request", "openai_endpoint"}
    assert kinds == dict.fromkeys(flags, "BOOL") | dict.fromkeys(texts, "BYTES")
