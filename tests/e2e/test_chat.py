"""A chat with a real engine: every way to ask, and its answers."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.conformance.clients import connect, text
from tests.e2e.llama import (
    ANSWER,
    ANSWER_SECS,
    FRANCE,
    GREEDY,
    QUESTION,
    Llama,
    events,
    every_engine,
    joined,
)
from tests.e2e.streams import STREAM, hear
from tests.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240), every_engine]

CONVERSATION = text("messages", json.dumps(QUESTION))
FLAGS = dict.fromkeys(
    (
        *("return_finish_reason", "return_cumulative_logprob", "return_logprobs"),
        *("return_num_input_tokens", "return_num_output_tokens"),
    ),
    True,
)
LAST_DIGITS = 1e-4
STREAMS = 8
SHORT = {**GREEDY, "max_tokens": 16}


@pytest.fixture(scope="module")
def prompt(server: Serving) -> str:
    """The question as the model's chat template writes it."""
    with Llama(server) as llama:
        echoed = str(llama.generate(**FRANCE, exclude_input_in_output=False)["text_output"])
    assert echoed.endswith(ANSWER)
    return echoed.removesuffix(ANSWER)


# Ways to ask.


def test_generate_answers_a_conversation(llama: Llama) -> None:
    assert llama.generate(**FRANCE) == {
        "model_name": "llama",
        "model_version": "1",
        "text_output": ANSWER,
    }


def test_the_deltas_of_a_stream_are_the_answer(llama: Llama) -> None:
    found = llama.stream(**FRANCE)
    assert len(found) > 1
    assert joined(found) == ANSWER


def test_the_deltas_of_a_grpc_stream_are_the_answer(server: Serving) -> None:
    heard = hear(server, CONVERSATION, STREAM, parameters=GREEDY)
    assert heard.errors == []
    assert heard.text == ANSWER
    assert len(heard.finals) > 1
    assert heard.finals == [False] * (len(heard.finals) - 1) + [True]


def test_a_grpc_request_that_does_not_ask_to_stream_has_one_response(server: Serving) -> None:
    heard = hear(server, CONVERSATION, parameters=GREEDY)
    assert (heard.text, heard.finals) == (ANSWER, [True])


def test_a_text_in_the_format_of_the_chat_gets_the_same_answer(
    server: Serving, llama: Llama, prompt: str
) -> None:
    alone = {"text_input": prompt, "exclude_input_in_output": True, **GREEDY}
    assert llama.generate(**alone)["text_output"] == ANSWER
    assert joined(llama.stream(text_input=prompt, **GREEDY)) == ANSWER
    heard = hear(server, text("text_input", prompt), STREAM, parameters=GREEDY)
    assert heard.text == ANSWER


def test_a_text_stands_before_its_completion_unless_it_is_excluded(
    llama: Llama, prompt: str
) -> None:
    assert llama.generate(text_input=prompt, **GREEDY)["text_output"] == prompt + ANSWER


def test_unary_grpc_is_refused_in_the_words_of_triton(server: Serving) -> None:
    async def ask() -> tuple[str, str]:
        async with connect(server, "grpc") as client:
            return await client.refusal("infer", "llama", [CONVERSATION])

    assert asyncio.run(ask()) == (
        "UNIMPLEMENTED",
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    )


# Sampling.


@pytest.mark.parametrize(
    "members",
    [
        {"max_tokens": 3, "temperature": 0},
        {"parameters": {"max_tokens": 3, "temperature": 0}},
        {"max_tokens": 3, "parameters": {"temperature": 0}},
        {"parameters": {"max_tokens": "3", "temperature": "0"}},
        {"sampling_parameters": '{"max_tokens": 3, "temperature": 0}'},
        {"sampling_parameters": '{"max_tokens": "3", "temperature": "0"}'},
        {"sampling_parameters": {"max_tokens": 3, "temperature": 0}},
        {
            "sampling_parameters": '{"max_tokens": 3, "temperature": 0}',
            "parameters": {"max_tokens": 1},
        },
    ],
    ids=["top", "nested", "both", "texts", "input", "input of texts", "object", "input wins"],
)
def test_sampling_parameters_may_stand_wherever_triton_reads_them(
    llama: Llama, members: dict[str, Any]
) -> None:
    assert llama.generate(messages=QUESTION, **members)["text_output"] == "The capital of"


@pytest.mark.parametrize("stop", [" France", [" France"], ["never", " Fran"]])
def test_a_stop_string_ends_the_text_before_it(llama: Llama, stop: str | list[str]) -> None:
    whole = llama.generate(**FRANCE, stop=stop, return_finish_reason=True)
    streamed = llama.stream(**FRANCE, stop=stop, return_finish_reason=True)
    assert whole["text_output"] == joined(streamed) == "The capital of"
    assert whole["finish_reason"] == streamed[-1]["finish_reason"] == "stop"


def test_a_seed_makes_a_random_answer_the_same_again(llama: Llama) -> None:
    asked = {"messages": QUESTION, "max_tokens": 24, "temperature": 1.5, "ignore_eos": True}
    first, second, other = (llama.generate(**asked, seed=seed) for seed in (7, 7, 8))
    assert first == second
    assert first != other


def test_every_response_separates_two_sequences(llama: Llama) -> None:
    asked = {"messages": QUESTION, "max_tokens": 12, "temperature": 1.0, "seed": 1, "n": 2}
    whole = llama.generate(**asked)["text_output"]
    deltas = [event["text_output"] for event in llama.stream(**asked)]
    assert whole[0] != whole[1]
    assert ["".join(parts) for parts in zip(*deltas, strict=True)] == whole


# Fields besides the text.


def test_an_answer_without_flags_is_its_text_only(llama: Llama) -> None:
    shown = {frozenset(event) for event in llama.stream(**FRANCE)}
    assert shown == {frozenset({"model_name", "model_version", "text_output"})}


def test_flags_describe_the_whole_answer(llama: Llama) -> None:
    whole = llama.generate(**FRANCE, **FLAGS, logprobs=1)
    assert whole["finish_reason"] == "stop"
    assert whole["cumulative_logprob"] < 0
    assert whole["num_output_tokens"] == len(json.loads(whole["logprobs"]))
    assert whole["num_input_tokens"] > len(QUESTION[0]["content"].split())


def test_flags_describe_each_response_of_a_stream(llama: Llama) -> None:
    whole = llama.generate(**FRANCE, **FLAGS, logprobs=1)
    streamed = llama.stream(**FRANCE, **FLAGS, logprobs=1)
    *before, last = (event["finish_reason"] for event in streamed)
    logprobs = [position for event in streamed for position in json.loads(event["logprobs"])]
    assert (set(before), last) == ({"None"}, "stop")
    # Two requests: the last digits depend on the steps in which an engine computes them.
    assert logprobs == nearly(json.loads(whole["logprobs"]))
    assert {event["num_input_tokens"] for event in streamed} == {whole["num_input_tokens"]}
    assert sum(event["num_output_tokens"] for event in streamed) == whole["num_output_tokens"]
    total = streamed[-1]["cumulative_logprob"]
    assert total == pytest.approx(whole["cumulative_logprob"], abs=LAST_DIGITS)


def nearly(positions: Sequence[dict[str, dict[str, Any]]]) -> list[dict[str, dict[str, Any]]]:
    """Log probabilities that are equal to those that differ by their last digits only."""
    return [
        {
            token: {**chance, "logprob": pytest.approx(chance["logprob"], abs=LAST_DIGITS)}
            for token, chance in position.items()
        }
        for position in positions
    ]


def test_the_limit_of_tokens_is_the_finish_reason(llama: Llama) -> None:
    asked = {"messages": QUESTION, "max_tokens": 5, "temperature": 0, **FLAGS}
    whole = llama.generate(**asked)
    assert (whole["finish_reason"], whole["num_output_tokens"]) == ("length", 5)


def test_every_response_has_the_id_of_its_request(server: Serving, llama: Llama) -> None:
    assert llama.generate(**FRANCE, id="x-1")["id"] == "x-1"
    assert {event["id"] for event in llama.stream(**FRANCE, id="x-2")} == {"x-2"}
    heard = hear(server, CONVERSATION, STREAM, request_id="x-3", parameters=GREEDY)
    assert heard.ids == {"x-3"}


# Side by side.


async def test_eight_streams_at_once_each_have_their_own_answer(
    server: Serving, llama: Llama
) -> None:
    asked = [
        {"text_input": counting(10 * number), "id": f"stream {number}", **SHORT}
        for number in range(1, STREAMS + 1)
    ]
    alone = [joined(llama.stream(**each)) for each in asked]
    async with httpx.AsyncClient(base_url=server.http, timeout=ANSWER_SECS) as client:
        together = await asyncio.gather(*(ask_stream(client, each) for each in asked))
    assert len(set(alone)) == STREAMS
    assert [joined(found) for found in together] == alone
    assert [{event["id"] for event in found} for found in together] == [
        {each["id"]} for each in asked
    ]


def counting(start: int) -> str:
    """Numbers, which a small model continues as surely alone as in a batch."""
    return ", ".join(str(number) for number in range(start, start + 6)) + ","


async def ask_stream(client: httpx.AsyncClient, members: dict[str, Any]) -> list[dict[str, Any]]:
    path = "/v2/models/llama/generate_stream"
    return events((await client.post(path, json={**members, "stream": True})).text)
