"""The same questions by every door and by vLLM itself: the same texts, tokens and reasons."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from loadtests.support import servers
from loadtests.support.generation import gateway_defaults, read_model
from loadtests.support.servers import serving as launched
from tests.conformance.clients import tensor, text
from tests.e2e.llama import ANSWER_SECS, DTYPE, SHIPPED, Llama, joined
from tests.e2e.streams import STREAM, hear
from tests.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

TOPICS = (
    *("rain", "bread", "the moon", "glass", "a river", "salt", "music", "a bridge", "wool", "tea"),
    *("iron", "a map", "honey", "wind", "paper", "a clock", "snow", "sugar", "a wheel", "soap"),
)
FEW_TOPICS = TOPICS[:5]
AT_A_TIME = 4
SAMPLING = {"temperature": 0, "max_tokens": 10}
CHAT = "/v1/chat/completions"
FIGURES = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")


class Answer(NamedTuple):
    """The parts of an answer that every door must give."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


Ask = Callable[[str], Answer]


def ask_all(topics: Sequence[str], ask: Ask) -> dict[str, Answer]:
    """The answers by topic; a few requests run at a time."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return dict(zip(topics, pool.map(ask, topics), strict=True))


def conversation(topic: str) -> list[dict[str, str]]:
    """One question about it."""
    return [{"role": "user", "content": f"What is {topic} made of? Say it in a few words."}]


@pytest.fixture(scope="module")
def reference(one_layer: Path) -> Iterator[dict[str, Answer]]:
    """The answers of vLLM's own server."""
    flags = (*read_model(SHIPPED, gateway_defaults()).flags, "--dtype", DTYPE)
    own = servers.vllm("llama", (*flags, "--model", str(one_layer))).launch()
    with launched(own, frozenset()) as server, _client(server.ports.http) as client:
        yield ask_all(TOPICS, lambda topic: _whole(client, topic))


def _client(port: int) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_SECS)


def _whole(client: httpx.Client, topic: str) -> Answer:
    body = {"model": "llama", "messages": conversation(topic), **SAMPLING}
    answered = client.post(CHAT, json=body)
    assert answered.status_code == 200, answered.text
    found = answered.json()
    (choice,) = found["choices"]
    return _answer(choice["message"]["content"], choice["finish_reason"], found["usage"])


def _answer(written: str, reason: str, usage: dict[str, int]) -> Answer:
    return Answer(written, reason, usage["prompt_tokens"], usage["completion_tokens"])


@pytest.fixture(params=["openai", "openai, streamed", "generate_stream", "ModelStreamInfer"])
def ask(request: pytest.FixtureRequest, server: Serving) -> Iterator[Ask]:
    """One of our doors."""
    with _client(server.ports["http"]) as client, Llama(server) as llama:
        yield {
            "openai": lambda topic: _whole(client, topic),
            "openai, streamed": lambda topic: _streamed(client, topic),
            "generate_stream": lambda topic: _generated(llama, topic),
            "ModelStreamInfer": lambda topic: _heard(server, topic),
        }[request.param]


def _streamed(client: httpx.Client, topic: str) -> Answer:
    body = {"model": "llama", "messages": conversation(topic), "stream": True, **SAMPLING}
    answered = client.post(CHAT, json={**body, "stream_options": {"include_usage": True}})
    assert answered.status_code == 200, answered.text
    *lines, last = [line for line in answered.text.split("\n\n") if line.startswith("data: ")]
    assert last == "data: [DONE]"
    *chunks, usage = [json.loads(line.removeprefix("data: ")) for line in lines]
    choices = [chunk["choices"][0] for chunk in chunks]
    written = "".join(choice["delta"].get("content") or "" for choice in choices)
    (reason,) = [each["finish_reason"] for each in choices if each["finish_reason"]]
    return _answer(written, reason, usage["usage"])


def _generated(llama: Llama, topic: str) -> Answer:
    found = llama.stream(messages=conversation(topic), **SAMPLING, **dict.fromkeys(FIGURES, True))
    tokens = sum(event["num_output_tokens"] for event in found)
    return Answer(joined(found), found[-1]["finish_reason"], found[0]["num_input_tokens"], tokens)


def _heard(server: Serving, topic: str) -> Answer:
    flags = [tensor(name, "BOOL", np.array([True])) for name in FIGURES]
    asked = text("messages", json.dumps(conversation(topic)))
    heard = hear(server, asked, STREAM, *flags, parameters=SAMPLING)
    assert heard.errors == []
    tokens = sum(_value(result, "num_output_tokens") for result in heard.results)
    last = heard.results[-1]
    reason = last.as_numpy("finish_reason")[0].decode()
    return Answer(heard.text, reason, _value(last, "num_input_tokens"), tokens)


def _value(result: Any, name: str) -> int:
    return int(result.as_numpy(name)[0])


@pytest.mark.parametrize("server", ["openvino_genai"], indirect=True)
def test_every_door_of_another_engine_gives_the_same_answers(server: Serving, ask: Ask) -> None:
    with Llama(server) as llama:
        wholes = ask_all(FEW_TOPICS, lambda topic: _asked_whole(llama, topic))
    assert ask_all(FEW_TOPICS, ask) == wholes


def _asked_whole(llama: Llama, topic: str) -> Answer:
    asked = {"messages": conversation(topic), **SAMPLING, **dict.fromkeys(FIGURES, True)}
    found = llama.generate(**asked)
    tokens = (found["num_input_tokens"], found["num_output_tokens"])
    return Answer(found["text_output"], found["finish_reason"], *tokens)


@pytest.mark.release
def test_every_door_answers_what_vllms_own_server_answers(
    reference: dict[str, Answer], ask: Ask
) -> None:
    assert ask_all(TOPICS, ask) == reference
