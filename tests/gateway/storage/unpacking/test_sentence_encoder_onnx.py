"""The exported ONNX file computes the values of transformers, for any batch and length."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gateway.storage.fetch import find
from tests.encoders import INPUTS, SENTENCES, TOLERANCE, Array, Reference, encode, padded
from tests.gateway.storage.unpacking.conftest import Unpack

NAME = "all-minilm-l6-v2-onnx"
EMBEDDING, HIDDEN = "sentence_embedding", "last_hidden_state"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(unpack: Unpack) -> Path:
    return unpack(NAME)


class Session:
    """The file in ONNX Runtime."""

    def __init__(self, folder: Path) -> None:
        onnxruntime = pytest.importorskip("onnxruntime")
        self.session = onnxruntime.InferenceSession(
            folder / "model.onnx", providers=["CPUExecutionProvider"]
        )

    def run(self, inputs: dict[str, Array]) -> tuple[Array, Array]:
        embedding, hidden = self.session.run([EMBEDDING, HIDDEN], inputs)
        return embedding, hidden


@pytest.fixture(scope="module")
def session(folder: Path) -> Session:
    return Session(folder)


@pytest.fixture(scope="module")
def sentences(folder: Path) -> Sequence[dict[str, Array]]:
    return [encode(folder, text) for text in SENTENCES]


def test_its_inputs_and_outputs_are_named_and_open_in_batch_and_length(session: Session) -> None:
    inputs = {each.name: (each.type, each.shape) for each in session.session.get_inputs()}
    assert inputs == dict.fromkeys(INPUTS, ("tensor(int64)", ["batch", "length"]))
    outputs = {each.name: each.shape for each in session.session.get_outputs()}
    assert outputs == {EMBEDDING: ["batch", 384], HIDDEN: ["batch", "length", 384]}


@pytest.mark.parametrize("index", range(len(SENTENCES)))
def test_a_single_sentence_agrees_with_transformers(
    session: Session, sentences: Sequence[dict[str, Array]], reference: Reference, index: int
) -> None:
    embedding, hidden = session.run(sentences[index])
    np.testing.assert_allclose(embedding, reference.embedding(sentences[index]), atol=TOLERANCE)
    np.testing.assert_allclose(hidden, reference.hidden(sentences[index]), atol=TOLERANCE)


@pytest.mark.parametrize("length", [None, 256], ids=["to the longest", "to 256"])
def test_padded_sentences_agree_with_single_ones(
    session: Session,
    sentences: Sequence[dict[str, Array]],
    reference: Reference,
    length: int | None,
) -> None:
    longest = max(each["input_ids"].shape[1] for each in sentences)
    embedding, hidden = session.run(padded(sentences, length or longest))
    for row, single in enumerate(sentences):
        own = single["input_ids"].shape[1]
        np.testing.assert_allclose(
            embedding[row : row + 1], reference.embedding(single), atol=TOLERANCE
        )
        np.testing.assert_allclose(
            hidden[row : row + 1, :own], reference.hidden(single), atol=TOLERANCE
        )


@pytest.mark.parametrize("shape", [(1, 1), (1, 512), (64, 2)])
def test_the_smallest_and_largest_shapes_are_accepted(
    session: Session, shape: tuple[int, int]
) -> None:
    embedding, hidden = session.run({name: np.ones(shape, np.int64) for name in INPUTS})
    assert embedding.shape == (shape[0], 384)
    assert hidden.shape == (*shape, 384)


def test_a_row_of_nothing_but_padding_is_finite_and_harms_no_other(
    session: Session, sentences: Sequence[dict[str, Array]], reference: Reference
) -> None:
    nothing = {name: np.zeros((1, 4), np.int64) for name in INPUTS}
    length = sentences[1]["input_ids"].shape[1]
    embedding, _ = session.run(padded([nothing, sentences[1]], length))
    assert np.isfinite(embedding).all()
    np.testing.assert_allclose(embedding[1:], reference.embedding(sentences[1]), atol=TOLERANCE)


def test_it_fits_in_what_was_reserved_on_the_disk(folder: Path) -> None:
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert 0.9 < size / find(NAME).unpacked_bytes <= 1
