"""The encoders of the model repository, by the official clients, against what transformers says."""

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from gateway.settings import ENVIRONMENT
from gateway.storage.store import ModelStore, default_root
from tests.conformance.clients import Client, connect
from tests.encoders import INPUTS, SENTENCES, TOLERANCE, Array, Reference, encode, padded
from tests.serving import ROOT, Serving, serving

STORED = {
    "minilm": "all-minilm-l6-v2-onnx",
    "minilm_torch": "all-minilm-l6-v2-torch",
    "densenet_onnx": "densenet-121-onnx",
}
ENCODERS = ("minilm", "minilm_torch")
WIRES = ("http.aio", "grpc.aio")
EMBEDDING, HIDDEN = "sentence_embedding", "last_hidden_state"
MANY = 48
SCORE = 0.46095502
"""Of every class and for every picture, as the package of the light DenseNet records it."""

pytestmark = pytest.mark.timeout(180)

Answer = tuple[Array, Array]
"""The embedding, and the last hidden state."""


@pytest.fixture(scope="module")
def store() -> ModelStore:
    """The user's; a test without its models, or what runs them, is skipped."""
    store = ModelStore(default_root(ENVIRONMENT))
    missing = [name for name in STORED.values() if not store.has(name)]
    if missing or any(find_spec(each) is None for each in ("onnxruntime", "torch")):
        pytest.skip(f"needs the extra 'cpu' and `sluice fetch {' '.join(missing)}`")
    return store


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of a fresh checkout, without the LLM."""
    folder = tmp_path_factory.mktemp("repository")
    for name in STORED:
        shutil.copytree(ROOT / "model_repository" / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def server(store: ModelStore, repository: Path) -> Iterator[Serving]:
    """A server with them, which ends well after every test."""
    with serving(repository) as started:
        yield started
    assert started.process.returncode == 0, started.text
    assert not [line for line in started.log if line.startswith("Traceback")], started.text


@pytest.fixture(scope="module")
def sentences(store: ModelStore) -> Sequence[dict[str, Array]]:
    return [encode(store.path(STORED["minilm"]), text) for text in SENTENCES]


@pytest.fixture(scope="module")
def expected(sentences: Sequence[dict[str, Array]]) -> Sequence[Answer]:
    """The result of transformers for each sentence."""
    reference = Reference()
    return [(reference.embedding(each), reference.hidden(each)) for each in sentences]


def wires(client: Client) -> Any:
    """The module whose inputs and requested outputs the client takes."""
    return tritonclient.http if client.over_http else tritonclient.grpc


def tensors(client: Client, inputs: dict[str, Array]) -> list[Any]:
    found = [wires(client).InferInput(name, inputs[name].shape, "INT64") for name in inputs]
    for tensor in found:
        tensor.set_data_from_numpy(inputs[tensor.name()])
    return found


async def embed(client: Client, model: str, inputs: dict[str, Array]) -> Answer:
    found = await client.call("infer", model, tensors(client, inputs))
    return found.as_numpy(EMBEDDING), found.as_numpy(HIDDEN)


def assert_agrees(found: Answer, expected: Answer) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        np.testing.assert_allclose(mine, theirs, atol=TOLERANCE)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("model", ENCODERS)
async def test_single_sentences_agree_with_transformers(
    server: Serving,
    sentences: Sequence[dict[str, Array]],
    expected: Sequence[Answer],
    model: str,
    wire: str,
) -> None:
    async with connect(server, wire) as client:
        for sentence, answer in zip(sentences, expected, strict=True):
            assert_agrees(await embed(client, model, sentence), answer)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("model", ENCODERS)
async def test_a_batch_that_the_client_padded_agrees_with_transformers(
    server: Serving,
    sentences: Sequence[dict[str, Array]],
    expected: Sequence[Answer],
    model: str,
    wire: str,
) -> None:
    async with connect(server, wire) as client:
        embedding, hidden = await embed(client, model, padded(sentences, 128))
    assert embedding.shape == (len(sentences), 384)
    for row, answer in enumerate(expected):
        own = answer[1].shape[1]
        assert_agrees((embedding[row : row + 1], hidden[row : row + 1, :own]), answer)


@pytest.mark.own_models("the statistics of executions")
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("model", ENCODERS)
async def test_many_sentences_at_once_share_batches_and_agree_with_transformers(
    server: Serving,
    sentences: Sequence[dict[str, Array]],
    expected: Sequence[Answer],
    model: str,
    wire: str,
) -> None:
    asked = [index % len(sentences) for index in range(MANY)]
    async with connect(server, wire) as client:
        before = await executions(client, model)
        answers = await asyncio.gather(*(embed(client, model, sentences[index]) for index in asked))
        used = await executions(client, model) - before
    for answer, index in zip(answers, asked, strict=True):
        assert_agrees(answer, expected[index])
    assert used < MANY


async def executions(client: Client, model: str) -> int:
    [found] = (await client.statistics(model)).model_stats
    return int(found.execution_count)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("model", ENCODERS)
async def test_inputs_of_unequal_length_are_refused_and_the_next_request_is_answered(
    server: Serving,
    sentences: Sequence[dict[str, Array]],
    expected: Sequence[Answer],
    model: str,
    wire: str,
) -> None:
    uneven = sentences[1] | {"attention_mask": sentences[1]["attention_mask"][:, :2]}
    async with connect(server, wire) as client:
        code, text = await client.refusal("infer", model, tensors(client, uneven))
        assert code == client.code("INVALID_ARGUMENT"), text
        assert "attention_mask" in text
        assert_agrees(await embed(client, model, sentences[1]), expected[1])


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("model", ENCODERS)
async def test_more_tokens_than_the_model_has_positions_and_none_are_refused(
    server: Serving,
    sentences: Sequence[dict[str, Array]],
    expected: Sequence[Answer],
    model: str,
    wire: str,
) -> None:
    async with connect(server, wire) as client:
        for length in (0, 513):
            inputs = {name: np.ones((1, length), np.int64) for name in INPUTS}
            code, text = await client.refusal("infer", model, tensors(client, inputs))
            assert code == client.code("INVALID_ARGUMENT"), text
            assert f"'input_ids' of model '{model}' has length {length} in dimension 1" in text
            assert "expected 1 to 512" in text
        assert_agrees(await embed(client, model, sentences[1]), expected[1])


@pytest.mark.parametrize("wire", WIRES)
async def test_a_picture_is_classified_with_labels(server: Serving, wire: str) -> None:
    picture = np.random.default_rng(0).random((3, 224, 224), dtype=np.float32)
    async with connect(server, wire) as client:
        tensor = wires(client).InferInput("data_0", picture.shape, "FP32")
        tensor.set_data_from_numpy(picture)
        asked = wires(client).InferRequestedOutput("fc6_1", class_count=3)
        best = await client.call("infer", "densenet_onnx", [tensor], outputs=[asked])
        plain = await client.call("infer", "densenet_onnx", [tensor])
    np.testing.assert_allclose(plain.as_numpy("fc6_1"), np.full(1000, SCORE), rtol=2e-3)
    for each in best.as_numpy("fc6_1").tolist():
        score, index, label = each.decode().split(":")
        assert float(score) == pytest.approx(SCORE, rel=2e-3)
        assert label == f"class_{index}"
    assert len(set(best.as_numpy("fc6_1").tolist())) == 3


@pytest.mark.own_models("loads and unloads")
async def test_models_that_are_not_stored_leave_the_others_alone(
    store: ModelStore, repository: Path, tmp_path: Path
) -> None:
    name = STORED["densenet_onnx"]
    (tmp_path / name).symlink_to(store.path(name))
    flags = (f"--model-store-path={tmp_path}", "--exit-on-error=false", "--strict-readiness=false")
    with serving(repository, *flags) as started:
        async with connect(started, "grpc.aio") as client:
            assert await client.call("is_server_ready")
            assert await client.call("is_model_ready", "densenet_onnx")
            assert not await client.call("is_model_ready", "minilm")
        assert "run: sluice fetch all-minilm-l6-v2-onnx" in started.text
    assert started.process.returncode == 0, started.text
