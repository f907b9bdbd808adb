"""Comparisons of texts; patterns and schemas are searched in a process."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse
from gateway.models.golden.similarity import cosine
from gateway.models.golden.tensor_checks import Mismatch
from gateway.models.golden.text_checks import Skipped, read_text_checks, redacted
from gateway.models.model import Model
from gateway.openai_contract import ENDPOINT, REQUEST, RESPONSE, read_request
from gateway.strict_json import StrictObject
from gateway.tensor import text_tensor
from tests.builders import ScriptedInstance, soon
from tests.conftest import Serve

OPENAI = ModelConfig(
    name="e",
    input=tuple(
        ModelInput(name=name, data_type=DataType.TYPE_STRING, dims=(1,))
        for name in (REQUEST, ENDPOINT)
    ),
    output=(ModelOutput(name=RESPONSE, data_type=DataType.TYPE_STRING, dims=(1,)),),
)
SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


async def never(model: str, one: str, other: str) -> float:
    raise AssertionError("no check compares meanings")


async def check(checks: dict[str, Any], text: str) -> None:
    found = read_text_checks(StrictObject(checks, "expect.text"))
    assert found
    for each in found:
        await each(text, never)


@pytest.mark.parametrize(
    ("checks", "text"),
    [
        ({"equals": "Paris"}, "Paris"),
        ({"prefix": "Par", "contains": "ari"}, "Paris"),
        ({"matches": "(?i)paris", "not_matches": "lyon"}, "It is PARIS"),
        ({"matches": "^é$"}, "é"),
        ({"json": SCHEMA}, '{"a": 1}'),
    ],
)
async def test_a_text_that_is_as_expected_passes(checks: dict[str, Any], text: str) -> None:
    await check(checks, text)


@pytest.mark.parametrize(
    ("checks", "text", "problem"),
    [
        ({"equals": "Paris"}, "Lyon", "text is not 'Paris': 'Lyon'"),
        ({"prefix": "Paris"}, "In Paris", "text does not begin with 'Paris': 'In Paris'"),
        ({"contains": "x"}, "y" * 70, f"text does not contain 'x': '{'y' * 60}…'"),
        ({"matches": "paris"}, "Lyon", "text does not match 'paris': 'Lyon'"),
        ({"not_matches": "Lyon"}, "Lyon", "text matches 'Lyon': 'Lyon'"),
        ({"json": SCHEMA}, "{", "text is no JSON: "),
        ({"json": SCHEMA}, '{"a": "b"}', "text does not fit the schema at $.a: 'b' is not of type"),
    ],
)
async def test_a_text_that_is_not_as_expected_fails(
    checks: dict[str, Any], text: str, problem: str
) -> None:
    with pytest.raises(Mismatch) as caught:
        await check(checks, text)
    assert problem in str(caught.value)


async def test_a_schema_refers_to_no_other_address(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("true")
    with pytest.raises(Mismatch, match="cannot be compared with the schema: Unresolvable: file:"):
        await check({"json": {"$ref": other.as_uri()}}, "{}")


async def test_a_pattern_in_a_schema_that_explodes_ends_in_time() -> None:
    with pytest.raises(Mismatch, match="takes more than 1 s to search"):
        await check({"json": {"pattern": "(a+)+$"}}, f'"{"a" * 60}!"')


@pytest.mark.parametrize(
    ("checks", "problem"),
    [
        ({"equals": 1}, "expect.text.equals: is 1, expected a text"),
        ({"matches": "("}, "expect.text.matches: is '(', expected a regular expression"),
        ({"similar": {"to": "x"}}, "expect.text.similar.model: is missing"),
        (
            {"similar": {"to": "x", "model": "m", "max": 1}},
            "expect.text.similar.max: is no member, expected one of to, min, model",
        ),
        (
            {"similar": {"to": "x", "model": "m", "min": 2}},
            "expect.text.similar.min: is 2, expected a number from -1 to 1",
        ),
        ({"json": "x"}, "expect.text.json: is 'x', expected a JSON schema"),
    ],
)
def test_a_check_that_is_none_is_refused_by_its_path(checks: dict[str, Any], problem: str) -> None:
    with pytest.raises(InferenceError) as caught:
        read_text_checks(StrictObject(checks, "expect.text"))
    assert problem in caught.value.message


def test_without_jsonschema_a_schema_is_refused_with_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.models.golden.text_checks.find_spec", lambda name: None)
    with pytest.raises(InferenceError, match=r"pip install 'sluice\[golden\]'"):
        read_text_checks(StrictObject({"json": {}}, "expect.text"))


async def test_similar_compares_by_the_cosine_of_a_model() -> None:
    async def similarity(model: str, one: str, other: str) -> float:
        assert (model, one) == ("embed", "wanted")
        return 0.9 if other == "near" else 0.5

    given = {"similar": {"to": "wanted", "model": "embed"}}
    (similar,) = read_text_checks(StrictObject(given, "expect.text"))
    await similar("near", similarity)
    with pytest.raises(Mismatch, match=r"the similarity 0\.500 to 'wanted' by model 'embed'"):
        await similar("far", similarity)


async def test_a_text_is_not_compared_by_a_model_that_is_not_loaded() -> None:
    def find(name: str, version: str) -> Model:
        raise InferenceError(Code.NOT_FOUND, f"'{name}' is not found")

    with pytest.raises(Skipped, match="model 'embed' is not loaded: 'embed' is not found"):
        await cosine(find, "embed", "a", "b")


class Watched(list[str]):
    """Texts, and the threads that read them."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__(texts)
        self.threads: set[int] = set()

    def __iter__(self) -> Iterator[str]:
        self.threads.add(threading.get_ident())
        return super().__iter__()


async def test_texts_are_redacted_without_work_on_the_event_loop() -> None:
    texts = Watched(["to a@b", "line\n\u2028 a@b"])
    assert await redacted("a@b", texts) == ["to [redacted]", "line\n\u2028 [redacted]"]
    assert texts.threads
    assert threading.get_ident() not in texts.threads


class Embedding:
    """A model with OpenAI's contract that embeds texts; each answer is given."""

    def __init__(self, serve: Serve, *answers: Any, config: ModelConfig = OPENAI) -> None:
        self.instance = ScriptedInstance()
        self.model = serve(self.instance, config=config)
        self.answers = answers

    async def cosine(self, one: str, other: str) -> float:
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(cosine(lambda *_: self.model, "e", one, other))
            for each in self.answers:
                execution = await soon(self.instance.begun())
                output = text_tensor(RESPONSE, [json.dumps(each)])
                execution.answer(InferResponse(outputs=(output,), final=True))
                execution.end()
        return asking.result()


async def test_a_model_with_the_contract_of_openai_is_asked_for_embeddings(serve: Serve) -> None:
    answers = [{"data": [{"embedding": each}]} for each in ([1, 0], [0.6, 0.8])]
    embedding = Embedding(serve, *answers)
    assert await embedding.cosine("a", "b") == pytest.approx(0.6)
    asked = [read_request(each.requests[0]) for each in embedding.instance.executions]
    assert asked == [
        ("embeddings", {"model": "e", "input": text, "encoding_format": "float"}) for text in "ab"
    ]


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([{"data": []}], "did not answer with one embedding of finite numbers"),
        ([{"data": [{"embedding": ["x"]}]}], "did not answer with one embedding of finite numbers"),
        ([{"data": [{"embedding": 1}]}], "did not answer with one embedding of finite numbers"),
        ([["data"]], "did not answer with one embedding of finite numbers"),
        (
            [{"data": [{"embedding": each}]} for each in ([1], [1, 2])],
            "has embeddings of 1 and 2 numbers",
        ),
    ],
    ids=["none", "texts", "number", "list", "sizes"],
)
async def test_an_answer_without_an_embedding_differs(
    serve: Serve, answers: list[Any], text: str
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await Embedding(serve, *answers).cosine("a", "b")
    (mismatch,) = caught.value.exceptions
    assert isinstance(mismatch, Mismatch)
    assert str(mismatch) == f"model 'e' {text}"


async def test_a_model_of_chats_alone_embeds_no_texts(serve: Serve) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await Embedding(serve, config=replace(OPENAI, input=OPENAI.input[:1])).cosine("a", "b")
    assert str(caught.value.exceptions[0]) == "model 'e' does not embed texts"
