"""The ensemble of the model repository that turns text into embeddings, by the official clients."""

import asyncio
import base64
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc
import tritonclient.http

from gateway.settings import ENVIRONMENT
from gateway.storage.store import ModelStore, default_root
from tests.conformance.clients import Client, connect
from tests.encoders import SENTENCES, TOLERANCE, Array, Reference, encode
from tests.serving import ROOT, Serving, serving

ENSEMBLE = "embed_text"
STEPS = ("tokenizer", "minilm", "pooling")
STORED = "all-minilm-l6-v2-onnx"
WIRES = ("http.aio", "grpc.aio")

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def stored() -> Path:
    """The encoder in the user's store; without it, or what runs it, the tests are skipped."""
    store = ModelStore(default_root(ENVIRONMENT))
    needed = ("onnxruntime", "tokenizers", "torch", "transformers")
    if not store.has(STORED) or any(find_spec(each) is None for each in needed):
        pytest.skip(f"needs the extra 'cpu' and `sluice fetch {STORED}`")
    return store.path(STORED)


@pytest.fixture(scope="module")
def server(stored: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with the ensemble and its steps, which ends well after every test."""
    repository = tmp_path_factory.mktemp("repository")
    for name in (ENSEMBLE, *STEPS):
        shutil.copytree(ROOT / "model_repository" / name, repository / name)
    with serving(repository) as started:
        yield started
    assert started.process.returncode == 0, started.text
    assert not [line for line in started.log if line.startswith("Traceback")], started.text


@pytest.fixture(scope="module")
def expected(stored: Path) -> Array:
    """The embedding of each sentence, as transformers has it."""
    reference = Reference()
    return np.concatenate([reference.embedding(encode(stored, text)) for text in SENTENCES])


async def embed(client: Client, *texts: bytes) -> Array:
    found = await client.call("infer", ENSEMBLE, inputs(client, *texts))
    embeddings: Array = found.as_numpy("embedding")
    return embeddings


def inputs(client: Client, *texts: bytes) -> list[Any]:
    wire = tritonclient.http if client.over_http else tritonclient.grpc
    tensor = wire.InferInput("text", [len(texts), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text] for text in texts], np.object_))
    return [tensor]


@pytest.mark.parametrize("wire", WIRES)
async def test_sentences_one_by_one_agree_with_transformers(
    server: Serving, expected: Array, wire: str
) -> None:
    async with connect(server, wire) as client:
        for row, text in enumerate(SENTENCES):
            found = await embed(client, text.encode())
            np.testing.assert_allclose(found, expected[row : row + 1], atol=TOLERANCE)


@pytest.mark.parametrize("wire", WIRES)
async def test_a_batch_of_different_lengths_agrees_with_transformers(
    server: Serving, expected: Array, wire: str
) -> None:
    async with connect(server, wire) as client:
        found = await embed(client, *(text.encode() for text in SENTENCES))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.mark.parametrize("wire", WIRES)
async def test_many_at_once_are_each_answered_with_their_own(
    server: Serving, expected: Array, wire: str
) -> None:
    asked: Sequence[int] = [number % len(SENTENCES) for number in range(32)]
    async with connect(server, wire) as client:
        found = await asyncio.gather(
            *(embed(client, SENTENCES[number].encode()) for number in asked)
        )
    np.testing.assert_allclose(np.concatenate(found), expected[asked], atol=TOLERANCE)


@pytest.mark.parametrize("wire", WIRES)
async def test_a_text_of_no_words_or_of_very_many_has_an_embedding(
    server: Serving, wire: str
) -> None:
    async with connect(server, wire) as client:
        found = await embed(client, b"", b"word " * 100_000)
    assert found.shape == (2, 384)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=TOLERANCE)


@pytest.mark.parametrize("wire", WIRES)
async def test_a_text_that_is_not_utf8_is_refused_and_the_next_is_answered(
    server: Serving, expected: Array, wire: str
) -> None:
    async with connect(server, wire) as client:
        code, text = await client.refusal("infer", ENSEMBLE, inputs(client, b"\xff\xfe"))
        assert code == client.code("INVALID_ARGUMENT"), text
        assert text.startswith("in ensemble 'embed_text', input 'text' must be UTF-8")
        found = await embed(client, SENTENCES[0].encode())
    np.testing.assert_allclose(found, expected[:1], atol=TOLERANCE)


def test_generate_takes_plain_json(server: Serving, expected: Array) -> None:
    answer = httpx.post(
        f"{server.http}/v2/models/{ENSEMBLE}/generate", json={"text": SENTENCES[1]}, timeout=30
    )
    assert answer.status_code == 200, answer.text
    np.testing.assert_allclose(answer.json()["embedding"], expected[1], atol=TOLERANCE)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_openais_client_gets_the_same_embeddings(
    server: Serving, stored: Path, expected: Array, encoding: Any
) -> None:
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(
            model=ENSEMBLE, input=list(SENTENCES), encoding_format=encoding
        )
    rows: list[Any] = [each.embedding for each in found.data]
    if encoding == "base64":
        rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
    np.testing.assert_allclose(rows, expected, atol=TOLERANCE)
    assert found.usage.prompt_tokens == sum(_tokens(stored, text) for text in SENTENCES)


def _tokens(stored: Path, text: str) -> int:
    return int(encode(stored, text)["attention_mask"].sum())
