"""The real engine behind every door: the same answers, and what other LLM backends promise."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.conformance.clients import tensor, text
from tests.e2e.llama import ANSWER, FRANCE, GREEDY, QUESTION, Llama, error_of, joined
from tests.e2e.streams import STREAM, hear
from tests.serving import Serving, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

FIGURES = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
PROMPT_TOKENS, ANSWER_TOKENS = 37, 8
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}


@pytest.fixture
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0) as found:
        yield found


def chat(client: openai.OpenAI, **members: Any) -> Any:
    members = {"messages": QUESTION, "temperature": 0, **members}
    return client.chat.completions.create(model="llama", **members)


def test_generate_and_its_stream_give_the_same_text_tokens_and_reason(llama: Llama) -> None:
    whole = llama.generate(**FRANCE, **dict.fromkeys(FIGURES, True))
    parts = llama.stream(**FRANCE, **dict.fromkeys(FIGURES, True))
    assert (whole["text_output"], whole["finish_reason"]) == (ANSWER, "stop")
    assert (whole["num_input_tokens"], whole["num_output_tokens"]) == (PROMPT_TOKENS, ANSWER_TOKENS)
    assert joined(parts) == ANSWER
    assert [each["finish_reason"] for each in parts] == ["None"] * (ANSWER_TOKENS - 1) + ["stop"]
    assert [each["num_output_tokens"] for each in parts] == [1] * ANSWER_TOKENS


def test_a_stream_of_grpc_gives_the_same(server: Serving) -> None:
    sampling = {"max_tokens": "32", "temperature": "0"}  # texts, as Triton's clients send them
    heard = hear(
        server,
        text("messages", json.dumps(QUESTION)),
        text("sampling_parameters", json.dumps(sampling)),
        STREAM,
        tensor("return_num_output_tokens", "BOOL", np.array([True])),
    )
    assert heard.errors == []
    assert heard.text == ANSWER
    assert heard.finals == [False] * (ANSWER_TOKENS - 1) + [True]
    counts = [each.as_numpy("num_output_tokens") for each in heard.results]
    assert (sum(int(each[0]) for each in counts), counts[0].dtype.name) == (ANSWER_TOKENS, "uint32")


def test_openais_client_gives_the_same(client: openai.OpenAI) -> None:
    whole = chat(client)
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (37, 8)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[-1].usage == whole.usage


def test_a_completion_continues_a_text_or_its_tokens(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "llama", "max_tokens": 4, "temperature": 0}
    of_text = client.completions.create(prompt="The capital of France is", **given)
    assert of_text.choices[0].text.startswith(" Paris")
    echoed = client.completions.create(prompt="The capital of France is", echo=True, **given)
    assert echoed.choices[0].text == f"The capital of France is{of_text.choices[0].text}"
    assert client.completions.create(prompt=[504, 3575], **given).usage.prompt_tokens == 2


def test_every_sequence_of_a_request_has_a_seed_of_its_own(llama: Llama) -> None:
    asked = {"text_input": "Once", "sampling_parameters": json.dumps({"n": 3, "seed": 7})}
    found = llama.generate(**asked, return_num_output_tokens=True, exclude_input_in_output=True)
    assert len(set(found["text_output"])) == 3
    assert (
        llama.generate(**asked, exclude_input_in_output=True)["text_output"]
        == (found["text_output"])
    )
    parts = llama.stream(**asked)
    assert ["".join(each["text_output"][n] for each in parts) for n in range(3)] == (
        found["text_output"]
    )


@pytest.mark.parametrize("tokens", [1, 5])
def test_sequences_of_a_long_prompt_are_begun_after_the_first(llama: Llama, tokens: int) -> None:
    sampling = {"n": 3, "seed": 7, "max_tokens": tokens, "ignore_eos": True}
    asked = {"text_input": "once upon a time " * 100, "parameters": sampling}
    figures = {"return_num_output_tokens": True, "return_finish_reason": True}
    found = llama.generate(**asked, **figures, exclude_input_in_output=True)
    assert found["num_output_tokens"] == [tokens] * 3
    assert found["finish_reason"] == ["length"] * 3
    parts = llama.stream(**asked, **figures)
    made = [sum(each["num_output_tokens"][n] for each in parts) for n in range(3)]
    assert made == [tokens] * 3
    assert parts[-1]["finish_reason"][2] == "length"


def test_texts_without_a_seed_differ_and_the_minimum_of_tokens_holds(llama: Llama) -> None:
    found = [llama.generate(text_input="Once")["text_output"] for _ in range(3)]
    assert len(set(found)) > 1
    longer = {"min_tokens": 20, "max_tokens": 24, "temperature": 0}
    parts = llama.stream(messages=QUESTION, parameters=longer, return_num_output_tokens=True)
    assert sum(each["num_output_tokens"] for each in parts) >= 20


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(["ran"], "The capital of F"), (["France is Paris."], "The capital of "), (["zzz"], ANSWER)],
)
def test_a_stop_string_cuts_the_text_within_a_token(
    llama: Llama, stop: list[str], expected: str
) -> None:
    sampling = json.dumps({**GREEDY, "stop": stop})
    parts = llama.stream(messages=QUESTION, sampling_parameters=sampling, return_finish_reason=True)
    assert joined(parts) == expected
    assert parts[-1]["finish_reason"] == "stop"


def test_the_end_can_be_ignored_and_tokens_can_be_ends(llama: Llama) -> None:
    asked = {"messages": QUESTION, "return_finish_reason": True}
    longer = llama.generate(**asked, parameters={**GREEDY, "ignore_eos": True})
    assert longer["text_output"].startswith(ANSWER)
    assert longer["finish_reason"] == "length"
    for ignore in (False, True):
        sampling = {**GREEDY, "stop_token_ids": [282], "ignore_eos": ignore}
        shorter = llama.generate(**asked, sampling_parameters=json.dumps(sampling))
        assert (shorter["text_output"], shorter["finish_reason"]) == ("The capital", "stop")


def test_the_end_of_a_structure_ends_the_text_also_where_ends_are_ignored(llama: Llama) -> None:
    sampling = {**GREEDY, "structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": True}
    found = llama.generate(
        messages=QUESTION, sampling_parameters=json.dumps(sampling), return_finish_reason=True
    )
    assert found["text_output"] in ("yes", "no")
    assert found["finish_reason"] == "stop"


def test_log_probabilities_are_those_of_the_chosen_tokens(
    llama: Llama, client: openai.OpenAI
) -> None:
    given = {"messages": QUESTION, "return_logprobs": True, "return_cumulative_logprob": True}
    parts = llama.stream(**given, parameters={**GREEDY, "logprobs": 1})
    entries = [entry for each in parts for entry in json.loads(each["logprobs"])]
    chosen = [next(iter(each.values())) for each in entries]
    assert "".join(each["decoded_token"] for each in chosen) == f"{ANSWER}<|im_end|>"
    total = parts[-1]["cumulative_logprob"]
    assert total == pytest.approx(sum(each["logprob"] for each in chosen), abs=1e-4)
    assert -10 < total < -0.1
    without = llama.generate(**given, parameters=GREEDY)
    assert without["logprobs"] == "null"
    # Another batch, or a prompt of the cache, rounds differently.
    assert without["cumulative_logprob"] == pytest.approx(total, abs=0.05)
    said = chat(client, logprobs=True).choices[0].logprobs.content
    logprobs = [each["logprob"] for each in chosen]
    assert [each.logprob for each in said] == pytest.approx(logprobs, abs=0.05)
    sampled = chat(client, logprobs=True, temperature=1, max_tokens=3, seed=1)
    assert len(sampled.choices[0].logprobs.content) == 3


def test_the_form_of_an_answer_can_be_given(llama: Llama, client: openai.OpenAI) -> None:
    def formed(**form: Any) -> str:
        sampling = {**GREEDY, "structured_outputs": form}
        found = llama.generate(messages=QUESTION, sampling_parameters=json.dumps(sampling))
        return str(found["text_output"])

    assert json.loads(formed(json=SCHEMA)).keys() == {"age"}
    assert formed(regex="(yes|no)!") in ("yes!", "no!")
    assert formed(choice=['a "b"', "c\n"]) in ('a "b"', "c\n")
    assert formed(choice=["\U0001f600", "\U0001f4a9"]) in ("\U0001f600", "\U0001f4a9")
    assert formed(grammar='root ::= "x" "y"') == "xy"
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    assert json.loads(chat(client, response_format=wanted).choices[0].message.content).keys() == {
        "age"
    }
    forced = chat(
        client, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "note"}}
    )
    (call,) = forced.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments).keys()) == ("note", {"age"})


@pytest.mark.parametrize(
    ("sampling", "status", "error"),
    [
        ({"bad_words": ["x"]}, 501, "'bad_words' is not supported by OpenVINO GenAI models"),
        ({"nonsense": 1}, 400, "unknown sampling parameter 'nonsense'"),
        ({"logprobs": 5}, 501, "of the chosen token only"),
        ({"temperature": -1}, 400, "'temperature' is -1, expected at least 0"),
        ({"top_p": 2}, 400, "top_p must be a positive float"),
        ({"presence_penalty": 3}, 400, "must be within [-2.0; 2.0], but got 3"),
        ({"stop_token_ids": [2**70]}, 400, "'stop_token_ids' is"),
        ({"temperature": 10**400}, 400, "'temperature' is"),
        ({"temperature": 1e300}, 400, "'temperature' is"),
        ({"top_k": 2**70}, 400, "'top_k' is"),
        ({"max_tokens": 0}, 400, "'max_tokens' is 0"),
        ({"max_tokens": 3, "min_tokens": 5}, 400, "'min_tokens' is 5"),
        ({"n": "many"}, 400, "'n' is 'many', expected a number"),
        ({"structured_outputs": {"regex": "(yes"}}, 400, "The parenthesis is not closed"),
        ({"structured_outputs": {"json": '{"type": "obj"}'}}, 400, 'Unsupported type "obj"'),
        ({"structured_outputs": {"grammar": "x ::= 3"}}, 400, "is refused: EBNF"),
        ({"structured_outputs": {"regex": "((a{50}){50}){50}"}}, 400, "125000 states"),
        ({"structured_outputs": {"structural_tag": "x"}}, 501, "'structural_tag'"),
    ],
)
def test_a_wrong_parameter_is_refused_and_the_engine_continues(
    llama: Llama, sampling: dict[str, Any], status: int, error: str
) -> None:
    asked = {"messages": QUESTION, "sampling_parameters": json.dumps(sampling)}
    refused = llama.post("/generate", asked)
    assert refused.status_code == status
    assert error in refused.json()["error"]
    assert "/" not in refused.json()["error"]
    llama.serves_on()


@pytest.mark.parametrize(
    ("members", "error"),
    [
        ({"text_input": ""}, "the prompt has no tokens"),
        ({"text_input": "a", "messages": QUESTION}, "got both"),
        ({"text_input": "word " * 3500}, "tokens, expected at most 3071: the model's cache has 96"),
        ({"text_input": "word " * 9000}, "has 8192 tokens or more, expected at most 8191"),
        ({"messages": [{"content": "x"}]}, "message 0 has no 'role'"),
        ({"messages": [{"role": "user", "content": None}]}, "expected a text"),
    ],
)
def test_a_wrong_prompt_is_refused(llama: Llama, members: dict[str, Any], error: str) -> None:
    refused = llama.post("/generate", members)
    assert refused.status_code == 400
    assert error in refused.json()["error"]
    streamed = llama.post("/generate_stream", {**members, "stream": True})
    assert error in error_of(streamed)["error"]


@pytest.mark.parametrize("depth", [980, 5000])
def test_a_value_that_is_nested_too_deeply_is_refused(llama: Llama, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    for name, given in {"sampling_parameters": f'{{"n": {nested}}}', "messages": nested}.items():
        prompt = {} if name == "messages" else {"messages": QUESTION}
        refused = llama.post("/generate", {**prompt, name: given})
        assert refused.status_code == 400, refused.text
        assert f"'{name}'" in refused.json()["error"] or depth < 1000
    llama.serves_on()


def test_openais_requests_that_cannot_be_served_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="'tools' is not supported by this model"):
        chat(client, tools=[TOOL])
    with pytest.raises(openai.BadRequestError, match="has the token 49152, expected 0 to 49151"):
        client.completions.create(model="llama", prompt=[49152])
    with pytest.raises(openai.APIStatusError, match="of the chosen token only"):
        chat(client, logprobs=True, top_logprobs=3)


def test_a_text_that_outgrows_the_cache_ends_with_length(server: Serving, llama: Llama) -> None:
    asked = {"text_input": "word " * 3040, "return_finish_reason": True, "stream": True}
    sampling = {"max_tokens": 500, "temperature": 0, "ignore_eos": True}
    parts = llama.stream(**asked, parameters=sampling, return_num_output_tokens=True)
    made = sum(each["num_output_tokens"] for each in parts)
    assert 0 < made <= 32
    assert parts[-1]["finish_reason"] == "length"
    server.wait_logged("text ended by the model's limit")


def test_streams_that_together_exceed_the_cache_all_end_well(llama: Llama) -> None:
    def asked(number: int) -> str:
        sampling = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
        prompt = f"{number} " + "word " * 400
        return joined(llama.stream(text_input=prompt, parameters=sampling))

    alone = [asked(number) for number in range(2)]
    with ThreadPoolExecutor(12) as together:
        found = list(together.map(asked, range(12)))
    assert found[:2] == alone
    assert all(found)


def test_two_hundred_streams_run_at_once(server: Serving, llama: Llama) -> None:
    def asked(number: int) -> int:
        sampling = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        with httpx.stream(
            "POST",
            f"{server.http}/v2/models/llama/generate_stream",
            json={"text_input": f"Number {number}", "stream": True, "parameters": sampling},
            timeout=120,
        ) as answered:
            return sum('"text_output"' in line for line in answered.iter_lines())

    with ThreadPoolExecutor(200) as together:
        assert set(together.map(asked, range(200))) == {4}
    assert idle(server)


def idle(server: Serving) -> bool:
    """Whether the engine has no request and its cache no block in use."""
    found = {name: value for name, value in server.metrics().items() if "openvino_genai" in name}
    using = [
        v for name, v in found.items() if any(f'"{w}"' in name for w in ("active", "used_blocks"))
    ]
    return len(using) == 2 and not any(using)


@pytest.mark.parametrize("prompt", ["Once upon a time", "the cat walks home " * 700])
def test_a_client_that_leaves_frees_the_engine(server: Serving, prompt: str) -> None:
    sampling = {"max_tokens": 2000, "temperature": 0, "ignore_eos": True}
    body = {"text_input": prompt, "stream": True, "parameters": sampling}
    url = f"{server.http}/v2/models/llama/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=60) as answered:
        if len(prompt) < 100:
            lines = answered.iter_lines()
            next(lines)
            wait_until(lambda: not idle(server), "the engine is busy")
    wait_until(lambda: idle(server), "the engine is idle")


def test_tokens_are_counted(server: Serving, llama: Llama) -> None:
    before = server.metric("gateway_completion_tokens_total", "llama")
    kinds = {"response_metric_type": "total_output_tokens"}
    lengths = server.metric("nv_llm_output_token_len_sum", "llama", **kinds)
    llama.stream(**FRANCE)
    wait_until(
        lambda: server.metric("gateway_completion_tokens_total", "llama") == before + ANSWER_TOKENS,
        "tokens are counted",
    )
    assert server.metric("nv_llm_output_token_len_sum", "llama", **kinds) == lengths + ANSWER_TOKENS
