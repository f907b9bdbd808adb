"""OpenAI's own client and the real engine: what applications do with it."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.e2e.figures import A_FEW_TOKENS, RUNNING, WASTED, changes, figures, wait_at_rest
from tests.e2e.llama import ANSWER, ANSWER_SECS, GREEDY, QUESTION, Llama, every_engine
from tests.serving import Serving, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CITY: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "city",
        "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "capital": {"type": "boolean"},
            },
            "required": ["name", "capital"],
            "additionalProperties": False,
        },
    },
}
ASKED: dict[str, Any] = {"model": "llama", "messages": QUESTION, **GREEDY}
ENDLESS: dict[str, Any] = {
    "max_tokens": 4000,
    "temperature": 1,
    "extra_body": {"ignore_eos": True},
}
TOOLS: dict[str, Any] = {"tools": [WEATHER], "max_tokens": 120}


@pytest.fixture
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.http}/v1", api_key="none", max_retries=0, timeout=ANSWER_SECS
    ) as found:
        yield found


def chat(client: Any, **asked: Any) -> Any:
    """The question, or what is asked instead."""
    return client.chat.completions.create(**{**ASKED, **asked})


@every_engine
def test_a_stream_is_the_answer_with_its_usage(client: openai.OpenAI) -> None:
    *deltas, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == ANSWER
    whole = chat(client)
    assert last.usage == whole.usage
    assert deltas[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_tool_that_must_be_called_is_called_with_arguments_of_its_schema(
    client: openai.OpenAI, choice: Any
) -> None:
    answered = chat(client, **TOOLS, tool_choice=choice)
    (call,) = answered.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert list(json.loads(call.function.arguments)) == ["city"]


@every_engine
def test_a_call_of_a_tool_is_streamed(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    written, names = "", []
    for chunk in chat(client, **TOOLS, tool_choice=named, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            assert part.function is not None
            written += part.function.arguments or ""
            names += [part.function.name] if part.function.name else []
    assert names == ["get_weather"]
    assert list(json.loads(written)) == ["city"]


def test_tools_that_may_be_called_may_be_left_alone(client: openai.OpenAI) -> None:
    answered = chat(client, **TOOLS, tool_choice="auto")
    assert answered.choices[0].message.content or answered.choices[0].message.tool_calls


@every_engine
def test_an_answer_follows_its_schema(client: openai.OpenAI) -> None:
    answered = chat(client, max_tokens=60, response_format=CITY)
    found = json.loads(answered.choices[0].message.content or "")
    assert set(found) == {"name", "capital"}
    assert isinstance(found["capital"], bool)


@every_engine
def test_several_answers_seeds_and_stops(client: openai.OpenAI) -> None:
    warm = {"temperature": 1.5, "max_tokens": 8, "n": 3, "seed": 7}
    first, second = (chat(client, **warm) for _ in range(2))
    assert texts(first) == texts(second)
    assert len(set(texts(first))) > 1
    stopped = chat(client, stop=[" of"])
    assert texts(stopped) == ["The capital"]


def texts(answered: ChatCompletion) -> list[str | None]:
    return [choice.message.content for choice in answered.choices]


def test_log_probabilities_come_with_each_token(client: openai.OpenAI) -> None:
    answered = chat(client, logprobs=True, top_logprobs=2)
    told = answered.choices[0].logprobs
    assert told is not None
    assert "".join(each.token for each in told.content or []).startswith(ANSWER)
    assert {len(each.top_logprobs) for each in told.content or []} == {2}


def test_completions_and_responses_answer_too(client: openai.OpenAI) -> None:
    completed = client.completions.create(
        model="llama", prompt="The capital of France", max_tokens=4, temperature=0
    )
    assert completed.choices[0].text == " is Paris."
    responded = client.responses.create(
        model="llama", input=QUESTION[0]["content"], max_output_tokens=32, temperature=0
    )
    assert responded.output_text == ANSWER


@pytest.mark.parametrize("n", [1, 2])
def test_closing_a_stream_stops_the_engine_and_every_token_is_counted(
    server: Serving, client: openai.OpenAI, llama: Llama, n: int
) -> None:
    with changes(server) as change:
        with chat(client, stream=True, n=n, **ENDLESS) as stream:
            wait_until(lambda: figures(server)[RUNNING] == n, "the engine has it")
            assert next(iter(stream)).choices
        wait_at_rest(server)
    made = change["vllm:generation_tokens_total"]
    counted = change["gateway_completion_tokens_total"]
    # Some sent tokens are unread; tokens that an abort finds half made count nowhere.
    assert counted <= made <= counted + change[WASTED] + 2 * n
    assert change[WASTED] <= n * A_FEW_TOKENS
    assert change["nv_inference_request_failure"] == change["CANCELED"] == 1
    llama.expect_answer()


@every_engine
async def test_many_tasks_each_get_their_own_answer(server: Serving) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{server.http}/v1", api_key="none", max_retries=0, timeout=ANSWER_SECS
    ) as client:
        found = await asyncio.gather(*(chat(client) for _ in range(6)))
    assert [texts(each) for each in found] == [[ANSWER]] * 6


@every_engine
def test_errors_are_those_that_the_client_knows(client: openai.OpenAI, llama: Llama) -> None:
    with pytest.raises(openai.NotFoundError):
        chat(client, model="nobody")
    mistakes: list[dict[str, Any]] = [{"messages": []}, {"n": 100_000}, {"temperature": -1}]
    for wrong in (*mistakes, {"logprobs": True, "top_logprobs": 10**6}):
        with pytest.raises(openai.BadRequestError):
            chat(client, **wrong)
    llama.expect_answer()
