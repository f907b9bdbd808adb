"""A model that thinks before it answers, by the real engine and a parser of vLLM's.

The model that is here does not think, but continues as its earlier answers in a conversation did.
The parser is one that reads text, and so needs no tokens that this model does not have. Of a
conversation it takes tokens `</`, `think` and `>` for the end of thoughts; hence `></`.
"""

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.llama import ANSWER_SECS
from tests.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

THOUGHTS = {
    "What is 2+2?": "<think>two and two are <four></think>The answer is 4.",
    "What is 3+3?": "<think>three and three are <six></think>The answer is 6.",
    "What is 4+4?": "<think>four and four are <eight></think>The answer is 8.",
}
QUESTION = [
    message
    for question, answer in THOUGHTS.items()
    for message in (
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    )
] + [{"role": "user", "content": "What is 5+5?"}]
ASKED: dict[str, Any] = {
    "model": "llama",
    "messages": QUESTION,
    "temperature": 0,
    "max_tokens": 40,
}
THOUGHT, ANSWER = re.compile(r"five and five are <\w+>"), re.compile(r"The answer is \d+\.")
"""Not the sum: how near to right this model is depends on the last bits of its sums.

An answer has several tokens: the parser loses an answer that arrives with `</think>` in one last
delta, and tokens share a delta when their reader is late.
"""


@pytest.fixture
def client(other_server: Serving) -> Iterator[openai.OpenAI]:
    """A client of a server whose model has a parser of thoughts."""
    with openai.OpenAI(
        base_url=f"{other_server.http}/v1", api_key="none", max_retries=0, timeout=ANSWER_SECS
    ) as found:
        yield found


def test_the_answer_is_separate_from_the_reasoning(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**ASKED).choices
    found = choice.message.model_dump()
    assert THOUGHT.fullmatch(found["reasoning"])
    assert ANSWER.fullmatch(found["content"])
    assert choice.finish_reason == "stop"


def test_they_are_streamed_apart(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(stream=True, **ASKED)
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
    thought = [index for index, delta in enumerate(deltas) if delta.get("reasoning")]
    answer = [index for index, delta in enumerate(deltas) if delta.get("content")]
    assert len(thought) > 1
    assert max(thought) < min(answer)
    assert THOUGHT.fullmatch("".join(deltas[index]["reasoning"] for index in thought))
    assert ANSWER.fullmatch("".join(deltas[index]["content"] for index in answer))


def test_responses_have_them_as_an_item_of_their_own(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="llama", input=QUESTION, temperature=0, max_output_tokens=40
    )
    thought, answer = (item.model_dump() for item in response.output)
    assert (thought["type"], answer["type"]) == ("reasoning", "message")
    assert THOUGHT.fullmatch(thought["content"][0]["text"])
    assert ANSWER.fullmatch(answer["content"][0]["text"])
