"""TensorRT-LLM models through the gateway, on the stand-in of the library."""

import asyncio
import json
import os
import signal
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc.aio

from tests.backends.tensorrtllm.conftest import Engine
from tests.conformance.clients import connect, tensor, text
from tests.serving import WAIT_SECS, Serving, wait_until

pytestmark = pytest.mark.timeout(120)
LLM = "/v2/models/llm"


def generate(http: httpx.Client, model: str = "llm", **body: Any) -> dict[str, Any]:
    response = http.post(f"/v2/models/{model}/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(http: httpx.Client, model: str = "llm", **body: Any) -> tuple[int, str]:
    response = http.post(f"/v2/models/{model}/generate", json=body)
    return response.status_code, response.json()["error"]


def events(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    response = http.post(f"{LLM}/generate_stream", json=body)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def load_error(http: httpx.Client, model: str) -> str:
    response = http.post(f"/v2/repository/models/{model}/load", json={})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_arguments_of_the_models_file_reach_the_library_as_they_are(
    server: Serving, engine: Engine
) -> None:
    opened = [event["opened"] for event in engine.events("opened")]
    assert {**opened[0], "pid": 0} in [
        {
            "model": "m",
            "max_seq_len": 100,
            "kv_cache_config": {"free_gpu_memory_fraction": 0.5},
            "enable_lora": True,
            "enable_iter_perf_stats": True,
            "pid": 0,
        },
        {"model": "m", "enable_iter_perf_stats": True, "pid": 0},
        {"model": "m", "enable_iter_perf_stats": False, "pid": 0},
    ]
    assert server.process.pid not in [each["pid"] for each in opened]


def test_a_config_is_completed(http: httpx.Client) -> None:
    config = http.get(f"{LLM}/config").json()
    assert config["model_transaction_policy"] == {"decoupled": True}
    inputs = {each["name"]: each["data_type"] for each in config["input"]}
    assert inputs["sampling_param_seed"] == "TYPE_UINT64"
    assert inputs["stop_words"] == "TYPE_STRING"
    classic = http.get("/v2/models/classic/config").json()
    assert classic.get("model_transaction_policy", {}).get("decoupled", False) is False
    assert classic["max_batch_size"] == 8


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


def test_requests_that_the_llm_api_cannot_serve_are_refused(http: httpx.Client) -> None:
    _, error = refusal(http, "classic", text_input="a", max_tokens=3, stream=True)
    assert error == "Streaming is only supported in decoupled mode."
    status, error = refusal(http, "classic", text_input="a", max_tokens=3, prompt_vocab_size=4)
    assert status == 501
    assert "'prompt_vocab_size' has no counterpart" in error
    status, error = refusal(http, "classic", text_input="a", lora_name="pirate")
    assert error == "LoRA feature is not enabled."


def test_the_old_name_of_an_ensemble_leads_to_the_one_model(http: httpx.Client) -> None:
    assert generate(http, "ensemble", text_input="a b", max_tokens=1)["text_output"] == "a ba"
    assert generate(http, "ensemble", text_input="a b")["text_output"] == "a ba b"


async def test_a_grpc_stream_answers_piece_by_piece(server: Serving) -> None:
    async with tritonclient.grpc.aio.InferenceServerClient(server.grpc) as client:

        async def requests() -> Any:
            inputs = [text("text_input", "a bb"), tensor("stream", "BOOL", np.array([True]))]
            yield {"model_name": "llm", "inputs": inputs, "enable_empty_final_response": True}

        texts: list[bytes] = []
        async with asyncio.timeout(WAIT_SECS):
            async for found, error in client.stream_infer(requests()):
                assert error is None
                texts += found.as_numpy("text_output").tolist()
                if found.get_response().parameters["triton_final_response"].bool_param:
                    break
        assert texts == [b"a", b" bb"]


def test_requests_are_in_the_engine_at_the_same_time(http: httpx.Client, engine: Engine) -> None:
    with http.stream(
        "POST", f"{LLM}/generate_stream", json={"text_input": "!slow first", "stream": True}
    ) as slow:
        lines = slow.iter_lines()
        next(lines)
        assert generate(http, text_input="second", exclude_input_in_output=True)["text_output"]
        assert not [each for each in engine.events("ended") if each["ended"] == "!slow first"]
    assert engine.wait_ended("!slow first")["aborted"] is True


def test_a_request_is_stopped_by_another_with_its_id(http: httpx.Client, engine: Engine) -> None:
    body = {"text_input": "!slow stopped", "stream": True, "id": "r1"}
    with http.stream("POST", f"{LLM}/generate_stream", json=body) as slow:
        lines = slow.iter_lines()
        next(lines)
        _, error = refusal(http, text_input="", stop=True, id="r1")
        assert error == "Request cancelled by client"
        assert any("Request cancelled by client" in line for line in lines)
    assert engine.wait_ended("!slow stopped")["aborted"] is True


def test_openai_chat_streams_and_counts(server: Serving, engine: Engine) -> None:
    client = openai.OpenAI(base_url=f"{server.http}/v1", api_key="-", max_retries=0)
    with client:
        messages: Any = [{"role": "user", "content": "hello you"}]
        chunks = list(
            client.chat.completions.create(
                model="llm",
                messages=messages,
                stream=True,
                stop=["."],
                stream_options={"include_usage": True},
            )
        )
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert choices[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in choices) == "<user> hello you"
        assert [each.finish_reason for each in choices if each.finish_reason] == ["stop"]
        usage = chunks[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, 3)
        sampling = engine.asked("<user> hello you")["sampling"]
        assert (sampling["temperature"], sampling["stop"]) == (1.0, ["."])
        assert sampling["max_tokens"] == 97  # what the context has room for
        whole = client.chat.completions.create(model="pirate", messages=messages, max_tokens=2)
        assert whole.choices[0].message.content == "<user> hello"
        assert (whole.choices[0].finish_reason, whole.model) == ("length", "pirate")
        assert engine.asked("<user> hello you")["lora"]["lora_name"] == "pirate"


def test_openai_completions_take_texts_and_tokens(http: httpx.Client) -> None:
    body = {"model": "llm", "prompt": "one more", "echo": True}
    found = http.post("/v1/completions", json=body).json()
    assert found["choices"][0]["text"] == "one moreone more"
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    logprobs = generate(http, text_input="one", return_logprobs=True, logprobs=1)["logprobs"]
    token, *_ = map(int, json.loads(logprobs)[0])
    tokens = http.post("/v1/completions", json={"model": "llm", "prompt": [token]})
    assert tokens.status_code == 200, tokens.text
    assert tokens.json()["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("chat/completions", {"messages": []}, 400, "'messages' is missing or empty"),
        ("chat/completions", {"messages": [1], "temperature": "x"}, 400, "expected a number"),
        ("chat/completions", {"messages": [1], "chat_template": "x"}, 501, "'chat_template'"),
        (
            "chat/completions",
            {"messages": [1], "chat_template_kwargs": {"chat_template": "{{ x }}"}},
            400,
            "'chat_template_kwargs' has 'chat_template'",
        ),
        ("completions", {"prompt": ["a", "b"]}, 400, "expected one text"),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "response_format": {"type": "json_schema", "json_schema": "x"},
            },
            400,
            "'response_format' is",
        ),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "stream": True,
                "stream_options": [1],
            },
            400,
            "'stream_options' is [1], expected an object",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "only parts of the type text",
        ),
        ("chat/completions", {"messages": ["a"]}, 400, "expected an object"),
        ("embeddings", {"input": "a"}, 501, "not 'embeddings'"),
    ],
)
def test_openai_requests_that_cannot_be_served_are_refused(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, text: str
) -> None:
    response = http.post(f"/v1/{path}", json={"model": "llm", **body})
    assert response.status_code == status, response.text
    assert text in response.json()["error"]["message"]


def test_tritons_metrics_are_shown(server: Serving, http: httpx.Client) -> None:
    counted = server.metric("gateway_completion_tokens_total", "llm")
    generate(http, text_input="to be counted")
    server.wait_metric("gateway_completion_tokens_total", "llm", counted + 3)
    labels = {"kv_cache_block_type": "fraction"}
    server.wait_metric("nv_trt_llm_kv_cache_block_metrics", "llm", 0.25, **labels)
    server.wait_metric("nv_trt_llm_request_metrics", "llm", 2, request_type="active")
    kind = {"response_metric_type": "total_output_tokens"}
    assert server.metric("nv_llm_output_token_len_count", "llm", **kind) >= 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("argument", "its model.yaml is refused by tensorrt_llm.LLM: 'kv_cache_confg': Extra"),
        ("empty", "its version folder '1' has no model.yaml or model.json"),
        ("count", "an instance group has count 2, expected 1"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(http: httpx.Client, name: str, text: str) -> None:
    error = load_error(http, f"bad_{name}")
    assert f"model 'bad_{name}': " in error
    assert text in error
    assert "/opt" not in error
    assert "Refusal" not in error


def test_an_engine_that_dies_or_is_killed_is_started_again(
    server: Serving, http: httpx.Client, engine: Engine
) -> None:
    def pids() -> list[int]:
        opened = [event["opened"] for event in engine.events("opened")]
        return [e["pid"] for e in opened if e["enable_iter_perf_stats"] is False]

    assert len(pids()) == 1
    body = {"text_input": "!slow waits", "stream": True}
    with http.stream("POST", "/v2/models/mortal/generate_stream", json=body) as slow:
        lines = slow.iter_lines()
        next(lines)
        os.kill(pids()[0], signal.SIGKILL)
        assert any("is not healthy" in line for line in lines)
    server.wait_logged("instance restarted")
    assert len(pids()) == 2
    assert generate(http, "mortal", text_input="again")["text_output"] == "againagain"
    for prompt in ("!die", "!dead"):
        wait_until(lambda: http.get("/v2/models/mortal/ready").status_code == 200, "it is ready")
        status, error = refusal(http, "mortal", text_input=prompt)
        assert status == 503
        assert "is not healthy" in error
    server.wait_logged("Executor worker died")
    server.wait_logged("Executor worker returned error")
