"""Adapters of a model by OpenAI's own client: each is a model of its own name."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.llama import ANSWER, ANSWER_SECS, GREEDY, QUESTION, shipped_arguments
from tests.e2e.shared_server import SharedServer
from tests.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

CONTEXT = int(shipped_arguments()["max_model_len"])


@pytest.fixture
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.http}/v1", api_key="none", max_retries=0, timeout=ANSWER_SECS
    ) as found:
        yield found


def say(client: Any, model: str, **members: Any) -> Any:
    asked = {"model": model, "messages": QUESTION, **GREEDY, **members}
    return client.chat.completions.create(**asked)


def test_a_model_that_is_ready_has_counted_no_token(
    server: Serving, shared_server: SharedServer
) -> None:
    counted = {name: n for name, n in shared_server.at_start.items() if "_tokens" in name}
    assert counted["vllm:generation_tokens_total"] == counted["vllm:prompt_tokens_total"] == 0


def test_an_adapter_is_listed_behind_its_model_with_the_length_of_its_context(
    client: openai.OpenAI,
) -> None:
    listed = [model.model_dump() for model in client.models.list()]
    found = [(each["id"], each["parent"], each["max_model_len"]) for each in listed]
    assert found == [("llama", None, CONTEXT), ("odd", "llama", CONTEXT)]
    assert client.models.retrieve("odd").id == "odd"


def test_an_adapter_answers_otherwise_than_its_model(client: openai.OpenAI) -> None:
    odd, plain = (say(client, model) for model in ("odd", "llama"))
    assert (plain.model, plain.choices[0].message.content) == ("llama", ANSWER)
    assert odd.model == "odd"
    assert odd.choices[0].message.content not in ("", ANSWER)
    chunks = list(say(client, "odd", stream=True))
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(deltas) == odd.choices[0].message.content
    assert {chunk.model for chunk in chunks} == {"odd"}


def test_completions_and_responses_know_the_adapter_too(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": "The sky was", "max_tokens": 8, "temperature": 0}
    odd, plain = (client.completions.create(model=model, **asked) for model in ("odd", "llama"))
    assert odd.choices[0].text != plain.choices[0].text
    responded = client.responses.create(
        model="odd", input="Hello", max_output_tokens=4, temperature=0
    )
    assert responded.model == "odd"


def test_another_name_is_not_found(client: openai.OpenAI) -> None:
    for ask in (lambda: say(client, "even"), lambda: client.models.retrieve("even")):
        with pytest.raises(openai.NotFoundError, match="The model `even` does not exist") as caught:
            ask()
        assert caught.value.param == "model"
