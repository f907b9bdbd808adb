"""The tokenizer of the encoder splits as the package's, and neither pads nor cuts too early."""

import json
import shutil
from pathlib import Path

import pytest

from tests.encoders import SENTENCES, encode, weights
from tests.gateway.storage.unpacking.conftest import Unpack

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(unpack: Unpack) -> Path:
    return unpack("all-minilm-l6-v2-onnx")


@pytest.mark.parametrize("text", SENTENCES)
def test_it_splits_as_the_tokenizer_of_the_package(folder: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights(), local_files_only=True)
    expected = tokenizer(text, truncation=True, max_length=256)["input_ids"]
    assert encode(folder, text)["input_ids"][0].tolist() == expected


def test_a_sentence_is_not_padded_and_a_long_text_is_cut_at_256_tokens(folder: Path) -> None:
    assert encode(folder, "Hi")["input_ids"].shape == (1, 3)
    assert encode(folder, "Hi " * 1000)["input_ids"].shape == (1, 256)


def test_weights_that_want_another_pooling_are_refused(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from gateway.storage.unpacking.sentence_encoder import SentenceEncoder

    shutil.copytree(weights(), tmp_path, dirs_exist_ok=True, ignore=lambda *_: ["*.safetensors"])
    pooling = tmp_path / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True}))
    with pytest.raises(ValueError, match=r"pooling_mode_cls_token.* expected .* mean pooling"):
        SentenceEncoder(tmp_path, attention="eager")
