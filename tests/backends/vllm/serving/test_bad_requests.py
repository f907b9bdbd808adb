"""Requests of OpenAI's that are wrong or odd, and the real engine."""

from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.openai_contract import OpenAiRefusal
from tests.backends.vllm.conftest import CONTEXT, Llama, ask, engine_marks, openai
from tests.backends.vllm.serving.odd_requests import REFUSED, SERVED, refused

pytestmark = engine_marks

CHAT = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 16,
}
SLOW = {"schema": {"type": "string", "pattern": "^[a-z]{1,10000}$"}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", REFUSED)
async def test_a_mistake_is_refused_in_openais_form(llama: Llama, case: str, stream: bool) -> None:
    members, status, words = REFUSED[case]
    refusal = await refused(llama, openai({**CHAT, "stream": stream, **members}))
    assert refusal.status == status
    assert refusal.code is (Code.INVALID_ARG if status == 400 else Code.NOT_FOUND)
    assert words in refusal.message
    await llama.serves_on()


@pytest.mark.parametrize("case", SERVED)
async def test_the_unusual_is_served(llama: Llama, case: str) -> None:
    asked = {**CHAT, "max_tokens": 3, **SERVED[case]}
    (answer,) = await llama.chunks(openai(asked))
    assert answer["choices"]
    await llama.serves_on()


@pytest.mark.parametrize(
    ("body", "endpoint", "words"),
    [
        ("{oops", "", "input 'openai_request' is not valid JSON"),
        ("[1]", "", "an object is expected"),
        ("{}", "nowhere", "input 'openai_endpoint' is 'nowhere', expected one of"),
    ],
)
async def test_what_is_no_request_is_refused(
    llama: Llama, body: str, endpoint: str, words: str
) -> None:
    with pytest.raises(InferenceError, match=words) as caught:
        await llama.answers(openai(body, endpoint))
    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "words"),
    [
        ("completions", {"prompt": []}, 400, "at least one prompt"),
        ("completions", {"prompt": [5_000_000]}, 400, "out of vocabulary"),
        ("completions", {"prompt": ["a"] * 3000}, 400, "prompt list length 3000"),
        ("completions", {"prompt": "a", "logprobs": 10**6}, 400, "max allowed: 20"),
        ("completions", {"prompt_embeds": "AAAA"}, 400, "enable-prompt-embeds"),
        ("responses", {"input": "x", "background": True}, 400, "background mode"),
        ("responses", {"input": "x", "previous_response_id": "resp_1"}, 404, "not found"),
        ("responses", {"input": "x " * 2 * CONTEXT}, 400, "maximum context length"),
        ("tokenize", {}, 400, "Field required"),
        ("detokenize", {"tokens": [-1]}, 400, "greater than or equal to 0"),
        ("tokenize", {"prompt": "a " * (1 << 19)}, 400, "takes at most 1048576 bytes of JSON"),
        ("detokenize", {"tokens": [1] * (1 << 19)}, 400, "takes at most 1048576 bytes"),
        (
            "responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", **SLOW}}},
            400,
            "takes too long to prepare",
        ),
    ],
)
async def test_other_endpoints_refuse_as_clearly(
    llama: Llama, endpoint: str, body: dict[str, Any], status: int, words: str
) -> None:
    refusal = await refused(llama, openai(body, endpoint))
    assert refusal.status == status
    assert words in refusal.message


async def test_events_that_say_nothing_yet_do_not_come_before_a_refusal(llama: Llama) -> None:
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}
    asked = {"input": "x", "stream": True, "text": text}
    answers = [answer async for answer in llama.instance.execute([openai(asked, "responses")])]
    ((_, refusal),) = answers
    assert isinstance(refusal, OpenAiRefusal)
    assert (refusal.status, "nonsense" in refusal.message) == (400, True)


async def test_a_request_has_one_prompt(llama: Llama) -> None:
    request = openai(CHAT)
    both = InferRequest(model="llama", inputs=(*request.inputs, *ask().inputs))
    with pytest.raises(InferenceError, match="'text_input' and 'openai_request', got both"):
        await llama.answers(both)
