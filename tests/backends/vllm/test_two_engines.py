"""A second engine in the same process, of another kind: embeddings."""

import json
from base64 import b64decode
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from gateway.errors import Code, InferenceError
from gateway.messages import Usage
from gateway.openai_contract import OpenAiRefusal
from tests.backends.vllm.conftest import ANSWER, Llama, ask, engine_marks, numbers, openai, strings
from tests.one_layer import WIDTH

pytestmark = engine_marks

COUNTS = {"return_num_input_tokens": True, "return_num_output_tokens": True}


@pytest_asyncio.fixture(loop_scope="session")
async def both(llama: Llama, embedder: Llama) -> tuple[Llama, Llama]:
    """One model that generates and one that embeds, both loaded by one backend."""
    return llama, embedder


async def test_each_has_its_own_metrics(both: tuple[Llama, Llama]) -> None:
    await both[0].say(ask(max_tokens=3, temperature=0))
    for each, model in zip(both, ("llama", "embedder"), strict=True):
        samples = [sample for family in each.instance.metrics for sample in family.samples]
        assert {sample.labels["model"] for sample in samples} == {model}
        assert "vllm:num_requests_running" in {sample.name for sample in samples}
    assert both[0].metric("vllm:generation_tokens_total") > 0


async def test_each_does_what_its_model_can(both: tuple[Llama, Llama]) -> None:
    llama, embedder = both
    said = await llama.say(ask(max_tokens=16, temperature=0, exclude_input_in_output=True))
    assert said == ANSWER
    with pytest.raises(InferenceError) as caught:
        await embedder.answers(ask())
    assert caught.value.message == (
        "Error generating stream: Model embedder does not support 'generate' request"
    )


@pytest.mark.parametrize(("given", "tokens"), [("The sky is blue.", 5), ([1, 2, 3], 3)])
async def test_an_embedding_is_one_response_with_a_vector(
    both: tuple[Llama, Llama], given: Any, tokens: int
) -> None:
    request = ask(None, embedding_request={"input": given}, **COUNTS)
    (response,) = await both[1].answers(request)
    vector = json.loads(strings(response, "text_output")[0])
    assert len(vector) == WIDTH
    assert sum(value * value for value in vector) == pytest.approx(1, abs=1e-2)
    assert numbers(response, "num_input_tokens") == [tokens]
    assert numbers(response, "num_output_tokens") == [0]


@pytest.mark.parametrize(
    ("embedding", "said"),
    [
        ({"input": ["a", "b"]}, "list of integers"),
        ({"input": {"prompt": "a"}}, "a text or a list of token ids"),
        ({}, "a text or a list of token ids"),
        ({"input": ""}, "cannot be empty"),
        ({"input": [10**9]}, "out of vocabulary"),
        ({"input": "a", "pooling_params": {"dimensions": [64]}}, "Matryoshka"),
        ({"input": "a", "pooling_params": {"task": ["x"]}}, "'dimensions'"),
    ],
)
async def test_a_wrong_embedding_request_is_refused(
    both: tuple[Llama, Llama], embedding: Any, said: str
) -> None:
    with pytest.raises(InferenceError) as caught:
        await both[1].answers(ask(None, embedding_request=embedding))
    assert caught.value.code is Code.INVALID_ARG
    assert said in caught.value.message


async def test_openais_embeddings_are_those_of_the_embedding_request(
    both: tuple[Llama, Llama],
) -> None:
    texts = ["The sky is blue.", "Grass is green."]
    (response,) = await both[1].answers(openai({"input": texts}, "embeddings"))
    answer = json.loads(strings(response, "openai_response")[0])
    (native,) = await both[1].answers(ask(None, embedding_request={"input": texts[0]}))
    vector = json.loads(strings(native, "text_output")[0])
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert answer["data"][0]["embedding"] == pytest.approx(vector, abs=1e-2)
    assert (answer["model"], response.final) == ("embedder", True)
    assert response.usage == Usage(prompt_tokens=answer["usage"]["prompt_tokens"])


async def test_embeddings_may_be_base64(both: tuple[Llama, Llama]) -> None:
    asked = {"input": "The sky is blue.", "model": "embedder"}
    floats, packed = [
        (await both[1].whole(openai({**asked, "encoding_format": form}, "embeddings")))["data"][0]
        for form in ("float", "base64")
    ]
    unpacked = np.frombuffer(b64decode(packed["embedding"]), "<f4")
    assert unpacked.tolist() == pytest.approx(floats["embedding"], abs=1e-5)


async def test_texts_are_scored_and_ranked(both: tuple[Llama, Llama]) -> None:
    pair = {"text_1": "The sky is blue.", "text_2": ["The sky is blue.", "iron"]}
    same, other = (await both[1].whole(openai(pair, "score")))["data"]
    assert same["score"] == pytest.approx(1, abs=2e-2)
    assert same["score"] > other["score"]
    ranking = {"query": "The sky is blue.", "documents": ["iron", "The sky is blue."]}
    best, worst = (await both[1].whole(openai(ranking, "rerank")))["results"]
    assert (best["index"], worst["index"]) == (1, 0)


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "said"),
    [
        ("chat/completions", {"messages": []}, 501, "does not support Chat Completions API"),
        ("completions", {"prompt": "a"}, 501, "does not support Completions API"),
        ("responses", {"input": "a"}, 501, "does not support Responses API"),
        ("embeddings", {"input": "a", "model": "llama"}, 404, "model `llama` does not exist"),
        ("embeddings", {"input": []}, 400, "at least one prompt"),
        ("embeddings", {"input": ""}, 400, "cannot be empty"),
        ("embeddings", {"input": ["a"] * 2049}, 400, "2048"),
        ("embeddings", {"input": "word " * 2000}, 400, "maximum context length"),
        ("embeddings", {"input": "a", "dimensions": 64}, 400, "Matryoshka"),
        ("embeddings", {"input": "a", "encoding_format": "hex"}, 400, "(at encoding_format)"),
        ("score", {"text_1": "a"}, 400, "Field required"),
        ("rerank", {"query": "a", "documents": []}, 400, ""),
    ],
)
async def test_what_an_encoder_cannot_do_is_refused_in_openais_form(
    both: tuple[Llama, Llama], endpoint: str, body: dict[str, Any], status: int, said: str
) -> None:
    with pytest.raises(OpenAiRefusal) as caught:
        await both[1].answers(openai(body, endpoint))
    assert caught.value.status == status, caught.value
    assert said in caught.value.message
    assert await both[1].whole(openai({"input": "a"}, "embeddings"))


async def test_embeddings_in_bytes_are_refused(both: tuple[Llama, Llama]) -> None:
    asked = {"input": "a", "encoding_format": "bytes"}
    with pytest.raises(InferenceError, match="ask for 'float' or 'base64'") as caught:
        await both[1].answers(openai(asked, "embeddings"))
    assert caught.value.code is Code.UNSUPPORTED
