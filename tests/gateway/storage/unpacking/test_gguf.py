"""Unpacking, for real: the weights, the tokenizer and the chat template are the model's own."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gateway.storage.fetch import find

MODEL = find("smollm2-135m-instruct")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.release,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        any(find_spec(package) is None for package in MODEL.packages),
        reason="needs the extra 'cpu'",
    ),
]


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_it_is_a_bfloat16_llama_with_tied_embeddings(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 8192


def test_its_weights_are_all_bfloat16_and_without_a_second_embedding(folder: Path) -> None:
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__")
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    assert len(header) == 272
    assert "lm_head.weight" not in header


def test_it_fits_in_what_was_reserved_on_the_disk(folder: Path) -> None:
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert 0.9 < size / MODEL.unpacked_bytes <= 1


def test_generation_ends_at_the_end_of_the_answer(folder: Path) -> None:
    generation = json.loads((folder / "generation_config.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["add_bos_token"] is False


def test_each_digit_is_a_token_and_spaces_before_digits_stay_together(tokenizer: Any) -> None:
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]
    assert tokenizer.tokenize("    42") == ["ĠĠĠĠ", "4", "2"]


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world! It's naïve.",
        "def f(x):\n\treturn  x + 1  # twice\r\n",
        "😀 👩‍👩‍👧 日本語 ½",
        "<|im_start|>user\nhi<|im_end|>\n",
    ],
)
def test_text_is_decoded_unchanged(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_special_token_is_one_token_and_none_is_added(tokenizer: Any) -> None:
    assert tokenizer.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    assert tokenizer.decode([1, 4093, 2], skip_special_tokens=True) == "user"
    assert tokenizer.encode("") == []


def test_the_chat_template_opens_the_answer(tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_steps_are_reported_in_order(folder: Path, steps: list[tuple[str, float]]) -> None:
    assert [step for step, _ in steps] == [
        *("starting", "reading the GGUF", "dequantizing", "writing", "tokenizer")
    ]
    shares = [done for _, done in steps]
    assert shares == sorted(shares)
    assert shares[0] == 0
