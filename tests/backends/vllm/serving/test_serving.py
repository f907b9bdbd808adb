"""OpenAI's requests, answered by the real engine."""

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import Code
from gateway.messages import InferResponse, Usage
from tests.backends.vllm.conftest import ANSWER, Llama, ask, engine_marks, openai, strings
from tests.backends.vllm.serving.odd_requests import NAMED, WEATHER, refused
from tests.builders import soon

pytestmark = engine_marks

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 16}
CHAT = {"messages": QUESTION, **GREEDY}
ENDLESS = {"messages": QUESTION, "max_tokens": 900, "ignore_eos": True}
PROMPT_TOKENS = 37
INVOCATIONS = "vllm:tool_call_parser_invocations_total"


async def content(llama: Llama, **members: Any) -> str:
    """The text of a conversation, in one piece."""
    answer = await llama.whole(openai({**CHAT, **members}))
    return str(answer["choices"][0]["message"]["content"])


async def deltas(llama: Llama, **members: Any) -> list[dict[str, Any]]:
    """The choices of a stream, one after the other."""
    chunks = await llama.chunks(openai({**CHAT, "stream": True, **members}))
    return [choice for chunk in chunks for choice in chunk["choices"]]


def joined(choices: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["delta"].get("content") or "" for c in choices if c["index"] == index)


def used(responses: list[InferResponse]) -> tuple[list[int], int, str]:
    """The prompt's tokens in each response, those of all completions, the reason to finish."""
    usages = [each.usage or Usage() for each in responses]
    completion = sum(usage.completion_tokens for usage in usages)
    return [usage.prompt_tokens for usage in usages], completion, usages[-1].finish_reason


@pytest.mark.parametrize(
    ("endpoint", "members", "prefix"),
    [
        ("chat/completions", {"messages": QUESTION}, "chatcmpl-"),
        ("completions", {"prompt": "The sky is"}, "cmpl-"),
    ],
)
@pytest.mark.parametrize(("given", "expected"), [("mine", "mine"), ("", "of-the-body")])
async def test_the_id_of_a_request_is_in_every_chunk_of_its_answer(
    llama: Llama, endpoint: str, members: dict[str, Any], prefix: str, given: str, expected: str
) -> None:
    asked = {**members, "max_tokens": 2, "request_id": "of-the-body"}
    for stream in (False, True):
        request = replace(openai({**asked, "stream": stream}, endpoint), id=given)
        chunks = await llama.chunks(request)
        assert {chunk["id"] for chunk in chunks} == {prefix + expected}


async def test_the_responses_endpoint_makes_its_own_ids(llama: Llama) -> None:
    asked = {"input": "Hi", "max_output_tokens": 2}
    answer = await llama.whole(replace(openai(asked, "responses"), id="mine"))
    assert answer["id"].startswith("resp_")
    assert "mine" not in answer["id"]


class TestChat:
    async def test_one_answer_is_vllms_own_json(self, llama: Llama) -> None:
        (response,) = await llama.answers(openai(CHAT))
        (body,) = strings(response, "openai_response")
        answer = json.loads(body)
        assert answer["object"] == "chat.completion"
        assert answer["model"] == "llama"
        assert answer["choices"][0]["message"]["content"] == ANSWER
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert json.dumps(answer, ensure_ascii=False, separators=(",", ":")) == body
        assert response.usage == Usage(PROMPT_TOKENS, 8, "stop")
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 8, "total_tokens": 45}
        assert answer["usage"].items() >= usage.items()

    async def test_a_stream_is_the_same_text_in_chunks(self, llama: Llama) -> None:
        responses = await llama.answers(openai({**CHAT, "stream": True}))
        chunks = [json.loads(strings(each, "openai_response")[0]) for each in responses]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert joined(choices) == ANSWER
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(chunks) - 1) + [
            "stop"
        ]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert not any("usage" in chunk for chunk in chunks)
        told = [PROMPT_TOKENS] + [0] * (len(chunks) - 1)
        assert used(responses) == (told, 8, "stop")

    async def test_usage_comes_when_asked_for_and_last(self, llama: Llama) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = await llama.chunks(openai({**CHAT, **options}))
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 8, "total_tokens": 45}
        assert (last["choices"], last["usage"]) == ([], usage)
        assert all(chunk["choices"] and chunk.get("usage") is None for chunk in chunks)

    @pytest.mark.parametrize(
        "question", ["Name a colour.", "Who wrote Hamlet?", "Zähle bis drei.", "Hi \U0001f600!"]
    )
    async def test_it_says_what_messages_say(self, llama: Llama, question: str) -> None:
        messages = [{"role": "user", "content": question}]
        said = await llama.say(ask(None, messages=messages, **GREEDY))
        assert await content(llama, messages=messages) == said
        assert joined(await deltas(llama, messages=messages)) == said

    async def test_responses_carry_the_index_of_their_sequence(self, llama: Llama) -> None:
        sampling = {"n": 3, "temperature": 1.5, "seed": 3, "max_tokens": 8, "ignore_eos": True}
        (whole,) = await llama.answers(openai({**CHAT, **sampling}))
        choices = json.loads(strings(whole, "openai_response")[0])["choices"]
        texts = [choice["message"]["content"] for choice in choices]
        assert len(set(texts)) == 3
        responses = await llama.answers(openai({**CHAT, **sampling, "stream": True}))
        streamed = [json.loads(strings(e, "openai_response")[0])["choices"][0] for e in responses]
        assert [joined(streamed, index) for index in range(3)] == texts
        for told in (used([whole]), used(responses)):
            assert (sum(told[0]), *told[1:]) == (PROMPT_TOKENS, 24, "length")

    @pytest.mark.parametrize("stop", [" France", ["never", " Fran"]])
    async def test_a_stop_string_ends_the_text_before_it(self, llama: Llama, stop: Any) -> None:
        assert await content(llama, stop=stop) == "The capital of"
        assert joined(await deltas(llama, stop=stop)) == "The capital of"

    async def test_the_same_seed_says_the_same(self, llama: Llama) -> None:
        said = [await content(llama, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
        assert said[0] == said[1] != said[2]

    async def test_log_probabilities_come_in_the_same_chunks(self, llama: Llama) -> None:
        asked = {"logprobs": True, "top_logprobs": 2}
        whole = await llama.whole(openai({**CHAT, **asked}))
        positions = whole["choices"][0]["logprobs"]["content"]
        assert "".join(each["token"] for each in positions).startswith(ANSWER)
        assert {len(each["top_logprobs"]) for each in positions} == {2}
        streamed = [choice["logprobs"] for choice in await deltas(llama, **asked)]
        assert [p for each in streamed if each for p in each["content"]] == positions

    async def test_beams_are_searched(self, llama: Llama) -> None:
        beams = {"use_beam_search": True, "n": 2, "max_tokens": 3}
        (response,) = await llama.answers(openai({**CHAT, **beams}))
        choices = json.loads(strings(response, "openai_response")[0])["choices"]
        assert len({choice["message"]["content"] for choice in choices}) == 2
        assert response.usage == Usage(PROMPT_TOKENS, 5, "length")  # one beam, then two


class TestConstraints:
    @pytest.mark.parametrize(
        ("constraint", "allowed"),
        [
            ({"structured_outputs": {"choice": ["Yes", "No"]}}, {"Yes", "No"}),
            ({"structured_outputs": {"regex": "[ab]{2}"}}, {"aa", "ab", "ba", "bb"}),
            ({"structured_outputs": {"grammar": 'root ::= "hello"'}}, {"hello"}),
            (
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "n", "schema": {"enum": [17]}},
                    }
                },
                {"17"},
            ),
        ],
        ids=["choice", "regex", "grammar", "json_schema"],
    )
    async def test_a_constraint_is_kept(
        self, llama: Llama, constraint: dict[str, Any], allowed: set[str]
    ) -> None:
        said = await content(llama, **constraint)
        assert said in allowed
        assert joined(await deltas(llama, **constraint)) == said

    async def test_any_object_is_json(self, llama: Llama) -> None:
        asked = {"response_format": {"type": "json_object"}, "stop": "}"}
        assert (await content(llama, **asked)).startswith("{")


class TestTools:
    async def test_a_tool_that_is_required_is_called(self, llama: Llama) -> None:
        asked = {**CHAT, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 80}
        choice = (await llama.whole(openai(asked)))["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert (call["type"], call["function"]["name"]) == ("function", "weather")
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        assert choice["finish_reason"] == "tool_calls"

    @pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
    async def test_a_call_is_streamed(self, llama: Llama, choice: Any, reason: str) -> None:
        asked = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 80}
        choices = await deltas(llama, **asked)
        calls = [call for each in choices for call in each["delta"].get("tool_calls") or ()]
        assert calls[0]["function"]["name"] == "weather"
        arguments = "".join(call["function"].get("arguments") or "" for call in calls)
        assert json.loads(arguments) == {"city": "Paris"}
        assert choices[-1]["finish_reason"] == reason

    async def test_a_tool_that_is_named_is_called(self, llama: Llama) -> None:
        asked = {**CHAT, "tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 80}
        (call,) = (await llama.whole(openai(asked)))["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}

    @pytest.mark.parametrize("choice", ["auto", "none"])
    async def test_a_model_may_prefer_to_talk(self, llama: Llama, choice: str) -> None:
        assert await content(llama, tools=[WEATHER], tool_choice=choice) == ANSWER

    async def test_what_the_model_says_is_parsed_as_a_call(self, llama: Llama) -> None:
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
        asked = {
            "tools": [WEATHER],
            "tool_choice": "auto",
            "structured_outputs": {"choice": [call]},
            "max_tokens": 80,
        }
        before = llama.metric(INVOCATIONS)
        choice = (await llama.whole(openai({**CHAT, **asked})))["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert choice["finish_reason"] == "tool_calls"
        assert llama.metric(INVOCATIONS) == before + 1


class TestOtherEndpoints:
    async def test_every_prompt_is_completed(self, llama: Llama) -> None:
        asked = {"prompt": ["The sky was", "One, two,"], "max_tokens": 4, "temperature": 0}
        (whole,) = await llama.answers(openai(asked, "completions"))
        answer = json.loads(strings(whole, "openai_response")[0])
        texts = [choice["text"] for choice in answer["choices"]]
        assert whole.usage == Usage(answer["usage"]["prompt_tokens"], 8, "length")
        responses = await llama.answers(openai({**asked, "stream": True}, "completions"))
        choices = [json.loads(strings(e, "openai_response")[0])["choices"][0] for e in responses]
        for index in (0, 1):
            assert "".join(c["text"] for c in choices if c["index"] == index) == texts[index]
        prompt, completion, _ = used(responses)
        assert (sum(prompt), completion) == (answer["usage"]["prompt_tokens"], 8)

    async def test_the_responses_endpoint_answers(self, llama: Llama) -> None:
        asked = {"input": QUESTION[0]["content"], "max_output_tokens": 16, "temperature": 0}
        (response,) = await llama.answers(openai(asked, "responses"))
        answer = json.loads(strings(response, "openai_response")[0])
        assert (answer["object"], answer["status"]) == ("response", "completed")
        assert answer["output"][0]["content"][0]["text"] == ANSWER
        assert response.usage == Usage(PROMPT_TOKENS, 8, "stop")

    async def test_events_of_the_responses_endpoint_have_their_names(self, llama: Llama) -> None:
        asked = {"input": QUESTION[0]["content"], "max_output_tokens": 16, "temperature": 0}
        responses = await llama.answers(openai({**asked, "stream": True}, "responses"))
        events = [json.loads(strings(each, "openai_response")[0]) for each in responses]
        names = [each.parameters["openai_event"] for each in responses]
        assert names == [event["type"] for event in events]
        assert names[:2] == ["response.created", "response.in_progress"]
        assert names[-1] == "response.completed"
        texts = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
        assert "".join(texts) == ANSWER
        told, completion, reason = used(responses)
        assert (sum(told), completion, reason) == (PROMPT_TOKENS, 8, "stop")

    async def test_tokens_and_texts_become_each_other(self, llama: Llama) -> None:
        (response,) = await llama.answers(openai({"prompt": "Hello, world!"}, "tokenize"))
        tokens = json.loads(strings(response, "openai_response")[0])["tokens"]
        text = await llama.whole(openai({"tokens": tokens}, "detokenize"))
        assert text == {"prompt": "Hello, world!"}
        assert response.usage == Usage()
        chat = await llama.whole(openai({"messages": QUESTION}, "tokenize"))
        assert chat["count"] == PROMPT_TOKENS

    @pytest.mark.parametrize(
        ("endpoint", "body", "title"),
        [
            ("embeddings", {"input": "x"}, "Embeddings"),
            ("score", {"text_1": "x", "text_2": "y"}, "Score"),
            ("rerank", {"query": "x", "documents": ["y"]}, "Rerank (Score)"),
        ],
    )
    async def test_what_the_model_does_not_support_is_refused(
        self, llama: Llama, endpoint: str, body: dict[str, Any], title: str
    ) -> None:
        refusal = await refused(llama, openai(body, endpoint))
        assert (refusal.code, refusal.status) == (Code.UNSUPPORTED, 501)
        assert refusal.message == f"The model does not support {title} API"


class TestLeaving:
    @pytest.mark.parametrize(
        ("body", "endpoint", "requests"),
        [
            ({**ENDLESS, "stream": True}, "chat/completions", 1),
            (ENDLESS, "chat/completions", 1),
            ({**ENDLESS, "n": 2, "temperature": 1}, "chat/completions", 2),
            ({"prompt": ["a", "b"], "max_tokens": 900, "ignore_eos": True}, "completions", 2),
        ],
        ids=["stream", "whole", "two sequences", "two prompts"],
    )
    async def test_cancelling_frees_the_engine_at_once(
        self, llama: Llama, body: dict[str, Any], endpoint: str, requests: int
    ) -> None:
        await llama.running(0)
        before = llama.metric("vllm:generation_tokens_total"), sum(llama.wasted)
        read: list[Usage] = []

        async def listen() -> None:
            async for _, answer in llama.instance.execute([openai(body, endpoint)]):
                assert isinstance(answer, InferResponse)
                read.append(answer.usage or Usage())

        listening = asyncio.create_task(listen())
        await llama.running(requests)
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(listening)
        began = time.monotonic()
        await llama.running(0)
        assert time.monotonic() - began < 1
        made = llama.metric("vllm:generation_tokens_total") - before[0]
        counted = sum(usage.completion_tokens for usage in read)
        counted += sum(llama.wasted) - before[1]
        # What it makes until the abort has reached it is not known.
        assert made - 2 * requests <= counted <= made

    async def test_closing_between_chunks_does_so_too(self, llama: Llama) -> None:
        execution = llama.instance.execute([openai({**ENDLESS, "stream": True})])
        await anext(execution)
        await soon(execution.aclose())
        await llama.running(0)
        assert await content(llama) == ANSWER


async def test_many_requests_are_in_flight_at_once(llama: Llama) -> None:
    async def say(stream: bool) -> str:
        return joined(await deltas(llama)) if stream else await content(llama)

    assert set(await asyncio.gather(*(say(n % 2 == 0) for n in range(32)))) == {ANSWER}
