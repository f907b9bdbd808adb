"""The sentence encoder as transformers runs it, sentence by sentence: others must agree to it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.storage.fetch import find, locate

Array = npt.NDArray[Any]

TOLERANCE = 1e-4
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
SENTENCES = (
    "Hi",
    "A man is eating food.",
    "A man is eating a piece of bread, slowly, with a knife and a fork, at the kitchen table.",
    "日本語 and naïve façades — 12,345.67 €",
    "The cheetah runs behind its prey. " * 12,
)


def weights() -> Path:
    """The folder of the package that carries the encoder."""
    return locate(find("all-minilm-l6-v2-onnx")).parent


def encode(folder: Path, text: str) -> dict[str, Array]:
    """The inputs for one sentence, by the tokenizer stored in `folder`."""
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text)
    rows = (found.ids, found.attention_mask, found.type_ids)
    return {name: np.array([row], np.int64) for name, row in zip(INPUTS, rows, strict=True)}


def padded(inputs: Sequence[dict[str, Array]], length: int) -> dict[str, Array]:
    """One batch of several sentences, with zeros up to that length."""

    def pad(array: Array) -> Array:
        return np.pad(array, ((0, 0), (0, length - array.shape[1])))

    return {name: np.concatenate([pad(each[name]) for each in inputs]) for name in INPUTS}


class Reference:
    """The encoder of the package, by transformers."""

    def __init__(self) -> None:
        from transformers import AutoModel

        self._model = AutoModel.from_pretrained(weights(), local_files_only=True).eval()

    def hidden(self, inputs: dict[str, Array]) -> Array:
        """The last hidden state."""
        import torch

        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        with torch.no_grad():
            found: Array = self._model(**tensors).last_hidden_state.numpy()
        return found

    def embedding(self, inputs: dict[str, Array]) -> Array:
        """The mean of the hidden states of one sentence, of length 1."""
        mean = self.hidden(inputs).mean(axis=1)
        found: Array = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return found
