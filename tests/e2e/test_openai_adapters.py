"""Adapters of the real model by OpenAI's own client: each is a model of its own name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.backends.vllm.test_engine_lora import write_adapter
from tests.e2e.figures import figures
from tests.e2e.llama import (
    ANSWER,
    ANSWER_SECS,
    GREEDY,
    QUESTION,
    shipped_arguments,
    write_llama,
)
from tests.serving import Serving, serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

CONTEXT = int(shipped_arguments()["max_model_len"])


@pytest.fixture(scope="module")
def server(stored_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server whose model has one adapter; it has answered nobody when it is ready."""
    repository = tmp_path_factory.mktemp("repository")
    write_llama(repository, {"enable_lora": True, "max_lora_rank": 8})
    folder = repository / "llama" / "1"
    write_adapter(folder / "odd", rank=8)
    (folder / "multi_lora.json").write_text(json.dumps({"odd": "odd"}))
    with serving(repository) as started:
        counted = {name: value for name, value in figures(started).items() if "_tokens" in name}
        assert counted["vllm:generation_tokens_total"] == counted["vllm:prompt_tokens_total"] == 0
        yield started
    assert started.process.returncode == 0, started.text


@pytest.fixture
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.http}/v1", api_key="none", max_retries=0, timeout=ANSWER_SECS
    ) as found:
        yield found


def say(client: Any, model: str, **members: Any) -> Any:
    asked = {"model": model, "messages": QUESTION, **GREEDY, **members}
    return client.chat.completions.create(**asked)


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
    asked: dict[str, Any] = {"prompt": "The sky is", "max_tokens": 8, "temperature": 0}
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
