"""Requests to TensorRT-LLM models and their answers, on the stand-in of the library."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from tests.backends.tensorrtllm.conftest import LLM, Engine, events, generate, refusal
from tests.conformance.clients import connect, tensor, text
from tests.serving import Serving


def test_the_prompt_comes_before_the_text_unless_excluded(http: httpx.Client) -> None:
    assert generate(http, text_input="one two")["text_output"] == "one twoone two"
    found = generate(http, text_input="one two", exclude_input_in_output=True)
    assert found["text_output"] == "one two"


def test_a_long_prompt_is_not_tokenised_where_streams_are_served(
    http: httpx.Client, engine: Engine
) -> None:
    prompt = " ".join(["lengthy"] * 900)
    found = generate(http, text_input=prompt, max_tokens=1, return_num_input_tokens=True)
    assert (found["text_output"], found["num_input_tokens"]) == (f"{prompt}lengthy", 900)
    assert engine.asked(prompt)["tokenised_in_loop"] is False
    generate(http, text_input="short")
    assert engine.asked("short")["tokenised_in_loop"] is True


def test_streamed_texts_are_deltas(http: httpx.Client) -> None:
    found = events(http, text_input="a bb ccc", stream=True, return_num_output_tokens=True)
    assert [each["text_output"] for each in found] == ["a", " bb", " ccc"]
    assert [each["num_output_tokens"] for each in found] == [1, 1, 1]
    assert not any("sluice_usage" in each for each in found)


def test_sampling_of_either_contract_reaches_the_library(
    http: httpx.Client, engine: Engine
) -> None:
    generate(
        http,
        text_input="classic names",
        max_tokens=5,
        stop_words=["x", ""],
        bad_words=["y"],
        top_p=0.5,
        random_seed=7,
    )
    sampling = engine.asked("classic names")["sampling"]
    assert (sampling["max_tokens"], sampling["stop"], sampling["bad"]) == (5, ["x"], ["y"])
    assert (sampling["top_p"], sampling["seed"]) == (0.5, 7)
    generate(
        http,
        text_input="newer names",
        sampling_param_max_tokens=6,
        sampling_param_stop=["z"],
        ignore_eos=True,
    )
    sampling = engine.asked("newer names")["sampling"]
    assert (sampling["max_tokens"], sampling["stop"], sampling["ignore_eos"]) == (6, ["z"], True)
    generate(http, text_input="as texts", sampling_parameters='{"max_tokens":"3","top_p":"1"}')
    sampling = engine.asked("as texts")["sampling"]
    assert (sampling["max_tokens"], sampling["top_p"]) == (3, 1.0)
    generate(http, text_input="with beams", beam_width=3)
    sampling = engine.asked("with beams")["sampling"]
    assert (sampling["use_beam_search"], sampling["best_of"], sampling["n"]) == (True, 3, 3)


def test_optional_outputs_come_when_asked_for(http: httpx.Client) -> None:
    assert generate(http, text_input="a bb").keys() == {
        "model_name",
        "model_version",
        "text_output",
    }
    found = generate(
        http,
        text_input="a bb",
        return_finish_reason=True,
        return_stop_reason=True,
        return_cumulative_logprob=True,
        return_log_probs=True,
        return_num_input_tokens=True,
        return_perf_metrics=True,
    )
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", "None")
    assert found["cumulative_logprob"] == found["cum_log_probs"] == -1.0
    assert found["output_log_probs"] == [-0.5, -0.5]
    assert found["num_input_tokens"] == 2
    assert (found["kv_cache_alloc_new_blocks"], found["kv_cache_hit_rate"]) == (2, 0.25)
    assert found["first_token_time_ns"] == 3_000_000_000


def test_several_sequences_are_elements_of_one_output(http: httpx.Client) -> None:
    found = generate(http, text_input="a b", num_return_sequences=2, exclude_input_in_output=True)
    assert found["text_output"] == ["a b", "a b"]


def test_every_sequence_says_why_it_has_ended(http: httpx.Client) -> None:
    two = {"num_return_sequences": 2, "return_finish_reason": True, "text_input": "a b"}
    assert generate(http, **two)["finish_reason"] == ["stop", "stop"]
    assert generate(http, **two, max_tokens=1)["finish_reason"] == ["length", "length"]
    last = events(http, **two, stream=True)[-1]
    assert last["finish_reason"] == ["stop", "stop"]


def test_openai_choices_come_in_one_body(http: httpx.Client) -> None:
    body = {"model": "llm", "prompt": "one two", "n": 2}
    found = http.post("/v1/completions", json=body).json()
    assert [(e["index"], e["text"], e["finish_reason"]) for e in found["choices"]] == [
        (0, "one two", "stop"),
        (1, "one two", "stop"),
    ]
    assert found["usage"]["completion_tokens"] == 4


def test_an_end_token_and_words_are_given_together(http: httpx.Client, engine: Engine) -> None:
    ends = {"end_id": 7, "pad_id": 7, "stop_words": ["x"]}
    assert generate(http, text_input="ends early", **ends)["text_output"]
    sampling = engine.asked("ends early")["sampling"]
    assert (sampling["stop"], sampling["stop_token_ids"]) == (["x"], [7])
    generate(http, text_input="never ends", end_id=-1, bad_words=["x"])
    sampling = engine.asked("never ends")["sampling"]
    assert (sampling["ignore_eos"], sampling.get("stop_token_ids")) == (True, None)
    generate(http, text_input="end alone", end_id=7)
    assert engine.asked("end alone")["sampling"]["end_id"] == 7


def test_guides_and_adapters_are_given_to_the_library(http: httpx.Client, engine: Engine) -> None:
    generate(
        http,
        text_input="guided pirate",
        guided_decoding_guide_type="regex",
        guided_decoding_guide="a+",
        lora_name="pirate",
    )
    asked = engine.asked("guided pirate")
    assert asked["sampling"]["guided_decoding"]["regex"] == "a+"
    assert (asked["lora"]["lora_name"], asked["lora"]["lora_int_id"]) == ("pirate", 1)
    assert asked["lora"]["lora_path"].endswith("llm/1/adapters/pirate")
    generate(http, text_input="by number", lora_task_id=1)
    assert engine.asked("by number")["lora"]["lora_name"] == "pirate"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "expected one of the inputs 'text_input' and 'messages', got neither"),
        ({"text_input": ["a", "b"]}, "input 'text_input' has 2 elements, expected 1"),
        ({"text_input": "a", "no_such": 1}, "no_such"),
        ({"text_input": "a", "max_tokens": 0}, "max_tokens must be a positive integer, got 0"),
        ({"text_input": "a", "sampling_parameters": "{"}, "is not valid JSON"),
        ({"text_input": "a", "lora_name": "x"}, "LoRA x is not supported, we currently support"),
        ({"text_input": "a", "lora_task_id": 2}, "expected a number from 1 to 1"),
        ({"text_input": "a", "guided_decoding_guide_type": "xml"}, "expected one of json, "),
        ({"text_input": "a", "stop": True}, "A request id must be provided"),
        ({"text_input": " ".join(["w"] * 1001)}, "more than max_num_tokens"),
        ({"messages": '[{"role": "system", "content": "a"}]'}, "the last message must be"),
    ],
)
def test_a_bad_request_is_refused_with_its_reason(
    http: httpx.Client, body: dict[str, Any], text: str
) -> None:
    status, error = refusal(http, **body)
    assert status == 400, error
    assert text in error


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"beam_width": [2]}, "'beam_width' is [2], expected a whole number"),
        ({"best_of": 1.5}, "'best_of' is 1.5, expected a whole number"),
        ({"top_p": {}}, "'top_p' is {}, expected a number"),
        ({"lora_name": ["p"]}, "'lora_name' is ['p'], expected a name"),
    ],
)
def test_sampling_of_a_wrong_type_is_refused(
    http: httpx.Client, given: dict[str, Any], text: str
) -> None:
    status, error = refusal(http, text_input="a", sampling_parameters=json.dumps(given))
    assert (status, text in error) == (400, True), error


def test_numbers_that_are_null_are_not_given(http: httpx.Client) -> None:
    given = '{"beam_width": null, "n": null}'
    assert generate(http, text_input="a", sampling_parameters=given)["text_output"] == "aa"


@pytest.mark.parametrize(
    "name", ["logits_processor", "return_context_logits", "truncate_prompt_tokens", "_private"]
)
def test_members_that_are_code_or_objects_are_not_for_clients(
    http: httpx.Client, name: str
) -> None:
    given = json.dumps({name: True})
    status, error = refusal(http, text_input="a", sampling_parameters=given)
    assert (status, f"sampling parameter '{name}' cannot be" in error) == (501, True), error


def test_text_that_may_be_revised_is_not_streamed(http: httpx.Client) -> None:
    for asked in ({"beam_width": 2}, {"sampling_param_best_of": 2}):
        body = {"text_input": "a b", "stream": True, **asked}
        response = http.post(f"{LLM}/generate_stream", json=body)
        assert response.status_code == 501, response.text
        event = json.loads(response.text.removeprefix("data: "))
        assert "cannot be streamed" in event["error"]


def test_refusals_of_the_engine_are_reported_without_paths(http: httpx.Client) -> None:
    status, error = refusal(http, text_input="!refuse this")
    assert status == 500
    assert error == "Error generating request: the prompt is longer than <path> allows"


def test_an_unexpected_exception_is_reported_in_fixed_words(
    server: Serving, http: httpx.Client
) -> None:
    status, error = refusal(http, text_input="!surprise")
    assert status == 500
    assert error == (
        "Error generating request: the model's program failed; the server's log says how"
    )
    server.wait_logged("KeyError")


def test_parts_of_a_message_are_one_text(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]
    messages = json.dumps([{"role": "user", "content": parts}])
    assert generate(http, messages=messages)["text_output"] == "<user> hello\nyou"


def test_an_abort_that_fails_does_not_end_the_watch(
    server: Serving, http: httpx.Client, engine: Engine
) -> None:
    for prompt in ("!slow !unabortable", "!slow left"):
        body = {"text_input": prompt, "stream": True}
        with http.stream("POST", f"{LLM}/generate_stream", json=body) as slow:
            next(slow.iter_lines())
        assert engine.wait_ended(prompt)["aborted"] is True
    server.wait_logged("the executor has not been told")


def test_messages_go_through_the_chat_template_once(http: httpx.Client, engine: Engine) -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert generate(http, messages=json.dumps(messages))["text_output"] == "<user> hello"
    assert engine.asked("<user> hello")["streaming"] is False


async def test_a_model_that_is_not_decoupled_answers_infer_with_a_batch_dimension(
    server: Serving,
) -> None:
    async with connect(server, "grpc.aio") as client:
        found = await client.call(
            "infer",
            "classic",
            [
                text("text_input", "a bb", shape=[1, 1]),
                tensor("max_tokens", "INT32", np.array([[9]], np.int32)),
            ],
        )
        assert found.as_numpy("text_output").tolist() == [[b"a bba bb"]]
