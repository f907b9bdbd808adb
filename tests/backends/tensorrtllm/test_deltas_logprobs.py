"""Log probabilities: what the library knows of each token, as each kind of client reads it."""

import json
import math
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from sluice_llm.deltas import (
    UNLIKELY,
    RankedToken,
    TokenLogprobs,
    chat_logprobs,
    completion_logprobs,
)

from backends.tensorrtllm.worker.sluice_tensorrtllm.deltas import token_logprobs
from tests.backends.tensorrtllm.conftest import Engine, events, generate
from tests.serving import Serving

pytestmark = pytest.mark.timeout(120)
CHAT = {"messages": [{"role": "user", "content": "hello you"}], "logprobs": True}
SAID = ["<user>", " hello", " you"]


def known(**logprobs: float) -> dict[int, Any]:
    """An entry of the library's, by letters that stand for tokens."""
    return {
        ord(letter): SimpleNamespace(logprob=value, rank=rank)
        for rank, (letter, value) in enumerate(logprobs.items(), 1)
    }


def found(token: str, entry: Any) -> TokenLogprobs:
    (only,) = token_logprobs(SimpleNamespace(token_ids=[ord(token)], logprobs=[entry]), 0)
    return only


def test_the_likeliest_come_by_their_log_probabilities() -> None:
    chance = found("b", known(a=-3.0, b=-2.0, c=-0.5))
    assert (chance.chosen.logprob, chance.chosen.rank) == (-2.0, 2)
    said = chat_logprobs([chance], 2, chr)["content"][0]
    assert (said["token"], said["logprob"], said["bytes"]) == ("b", -2.0, [98])
    assert [each["token"] for each in said["top_logprobs"]] == ["c", "b"]
    assert chat_logprobs([chance], 0, chr)["content"][0]["top_logprobs"] == []


def test_a_chosen_token_without_an_entry_is_unlikely() -> None:
    chance = found("z", known(a=-0.1))
    assert chance.chosen == RankedToken(ord("z"), UNLIKELY)
    told = completion_logprobs([chance], 1, chr, 0)
    assert told["top_logprobs"] == [{"a": -0.1, "z": UNLIKELY}]


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_values_that_json_lacks_are_unlikely(value: float) -> None:
    assert found("a", known(a=value)).chosen.logprob == UNLIKELY
    assert found("a", value).chosen.logprob == UNLIKELY


def test_numbers_alone_are_those_of_the_chosen_tokens() -> None:
    assert found("a", -0.25) == TokenLogprobs(RankedToken(97, -0.25), (RankedToken(97, -0.25),))


def test_only_new_tokens_are_read() -> None:
    grown = SimpleNamespace(token_ids=[1, 2], logprobs=[{1: None}, -0.5])
    assert [each.chosen.token for each in token_logprobs(grown, 1)] == [2]
    assert token_logprobs(SimpleNamespace(token_ids=[1], logprobs=None), 0) == ()


def test_offsets_continue_at_the_end_of_the_last_text() -> None:
    told = completion_logprobs([found("a", -0.1), found("b", -0.1)], 0, chr, 7)
    assert told["text_offset"] == [7, 8]
    assert told["top_logprobs"] == [{"a": -0.1}, {"b": -0.1}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_them(server: Serving, engine: Engine, stream: bool) -> None:
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="-", max_retries=0) as client:
        asked: Any = {"model": "llm", "top_logprobs": 2, **CHAT}
        answer: Any = client.chat.completions.create(**asked, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    content = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
    assert [each.token for each in content] == SAID
    assert {each.logprob for each in content} == {-0.5}
    assert [(t.token, t.logprob) for t in content[1].top_logprobs] == [
        (" hello", -0.5),
        ("<other>", -9.0),
    ]
    assert bytes(content[1].bytes).decode() == " hello"
    assert engine.asked("<user> hello you")["sampling"]["logprobs"] == 2


def test_a_chat_has_none_unless_asked(http: httpx.Client, engine: Engine) -> None:
    body = {"model": "llm", **CHAT, "logprobs": False}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["logprobs"] is None
    assert "logprobs" not in engine.asked("<user> hello you")["sampling"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_has_them(server: Serving, stream: bool) -> None:
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="-", max_retries=0) as client:
        asked: Any = {"model": "llm", "prompt": "one two", "logprobs": 1, "stream": stream}
        answer: Any = client.completions.create(**asked)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    told = [choice.logprobs for choice in choices if choice.logprobs]
    assert len(told) == (2 if stream else 1)
    assert [each for one in told for each in one.tokens] == ["one", " two"]
    assert [each for one in told for each in one.text_offset] == [0, 3]
    assert [each for one in told for each in one.token_logprobs] == [-0.5, -0.5]
    assert [each for one in told for each in one.top_logprobs] == [{"one": -0.5}, {" two": -0.5}]


def test_the_text_contract_has_them_by_tokens(http: httpx.Client) -> None:
    asked = {"text_input": "one two", "return_logprobs": True, "logprobs": 2}
    told = json.loads(generate(http, **asked)["logprobs"])
    assert [next(iter(each.values())) for each in told] == [
        {"logprob": -0.5, "rank": 1, "decoded_token": "one"},
        {"logprob": -0.5, "rank": 1, "decoded_token": " two"},
    ]
    assert [len(each) for each in told] == [2, 2]
    parts = [json.loads(each["logprobs"]) for each in events(http, **asked, stream=True)]
    assert [each for part in parts for each in part] == told
    assert generate(http, text_input="one", return_logprobs=True)["logprobs"] == "null"


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("chat/completions", {**CHAT, "logprobs": 2}, "'logprobs' is 2, expected true or false"),
        ("chat/completions", {**CHAT, "top_logprobs": 21}, "'top_logprobs' is 21, expected 0 to"),
        ("chat/completions", {**CHAT, "top_logprobs": 10**9}, "expected 0 to 20"),
        ("chat/completions", {**CHAT, "top_logprobs": "2"}, "expected an integer"),
        (
            "chat/completions",
            {"messages": CHAT["messages"], "top_logprobs": 2},
            "'top_logprobs' needs 'logprobs' to be true",
        ),
        ("completions", {"prompt": "a", "logprobs": -1}, "'logprobs' is -1, expected 0 to 20"),
        ("completions", {"prompt": "a", "logprobs": True}, "expected an integer"),
        ("completions", {"prompt": "a", "logprobs": 1, "echo": True}, "of an 'echo'"),
    ],
)
def test_a_wrong_wish_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], text: str
) -> None:
    response = http.post(f"/v1/{path}", json={"model": "llm", **body})
    assert response.status_code == 400, response.text
    assert text in response.json()["error"]["message"]
