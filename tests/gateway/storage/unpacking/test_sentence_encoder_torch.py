"""The package of torch.export computes the values of transformers, for any batch and length."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from gateway.storage.fetch import find
from tests.encoders import INPUTS, SENTENCES, TOLERANCE, Array, Reference, encode, padded
from tests.gateway.storage.unpacking.conftest import Unpack

NAME = "all-minilm-l6-v2-torch"

pytestmark = pytest.mark.timeout(300)

Run = Callable[[dict[str, Array]], tuple[Array, Array]]


@pytest.fixture(scope="module")
def folder(unpack: Unpack) -> Path:
    return unpack(NAME)


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    torch = pytest.importorskip("torch")
    module = torch.export.load(folder / "model.pt2").module()

    def run(inputs: dict[str, Array]) -> tuple[Array, Array]:
        with torch.inference_mode():
            embedding, hidden = module(*(torch.from_numpy(inputs[name]) for name in INPUTS))
        return embedding.numpy(), hidden.numpy()

    return run


@pytest.fixture(scope="module")
def sentences(folder: Path) -> Sequence[dict[str, Array]]:
    return [encode(folder, text) for text in SENTENCES]


@pytest.mark.parametrize("index", range(len(SENTENCES)))
def test_a_single_sentence_agrees_with_transformers(
    run: Run, sentences: Sequence[dict[str, Array]], reference: Reference, index: int
) -> None:
    embedding, hidden = run(sentences[index])
    np.testing.assert_allclose(embedding, reference.embedding(sentences[index]), atol=TOLERANCE)
    np.testing.assert_allclose(hidden, reference.hidden(sentences[index]), atol=TOLERANCE)


@pytest.mark.parametrize("length", [256, 512])
def test_padded_sentences_agree_with_single_ones(
    run: Run, sentences: Sequence[dict[str, Array]], reference: Reference, length: int
) -> None:
    embedding, hidden = run(padded(sentences, length))
    for row, single in enumerate(sentences):
        own = single["input_ids"].shape[1]
        np.testing.assert_allclose(
            embedding[row : row + 1], reference.embedding(single), atol=TOLERANCE
        )
        np.testing.assert_allclose(
            hidden[row : row + 1, :own], reference.hidden(single), atol=TOLERANCE
        )


@pytest.mark.parametrize("shape", [(1, 1), (1, 512), (64, 2)])
def test_the_smallest_and_largest_shapes_are_accepted(run: Run, shape: tuple[int, int]) -> None:
    embedding, hidden = run({name: np.ones(shape, np.int64) for name in INPUTS})
    assert embedding.shape == (shape[0], 384)
    assert hidden.shape == (*shape, 384)


def test_it_fits_in_what_was_reserved_on_the_disk(folder: Path) -> None:
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert 0.9 < size / find(NAME).unpacked_bytes <= 1
