"""A second engine in the same process, of another kind: embeddings."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from backends.vllm.backend import VllmBackend
from gateway.errors import Code, InferenceError
from tests.backends.vllm.conftest import ANSWER, Llama, Write, ask, numbers, strings

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

COUNTS = {"return_num_input_tokens": True, "return_num_output_tokens": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(write: Write) -> AsyncIterator[tuple[Llama, Llama]]:
    """One model that generates and one that embeds, both loaded by one backend."""
    backend = VllmBackend()
    llama = Llama(await backend.load(write()))
    embedder = Llama(await backend.load(write("embedder", runner="pooling", convert="embed")))
    yield llama, embedder
    for each in (llama, embedder):
        await each.instance.close()


async def test_each_has_its_own_metrics(both: tuple[Llama, Llama]) -> None:
    await both[0].say(ask(max_tokens=3, temperature=0))
    for each, model in zip(both, ("llama", "embedder"), strict=True):
        samples = [sample for family in each.instance.metrics() for sample in family.samples]
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
    assert len(vector) == 576
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
