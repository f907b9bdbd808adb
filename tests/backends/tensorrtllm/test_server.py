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

from tests.backends.tensorrtllm.conftest import LLM, Engine, generate, load_error, refusal
from tests.conformance.clients import tensor, text
from tests.serving import WAIT_SECS, Serving, wait_until

pytestmark = pytest.mark.timeout(120)


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
    assert "Mistake" not in error


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
