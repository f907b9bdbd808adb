"""The adapters that a model offers."""

import json
from pathlib import Path
from typing import Any

import pytest

from backends.vllm.settings import LoraAdapter, LoraAdapters, LoraRefusal, read_adapters
from gateway.errors import Code, InferenceError


def written(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "multi_lora.json").write_text(text)
    return folder


def test_adapters_are_numbered_in_the_order_of_the_file(tmp_path: Path) -> None:
    adapters = read_adapters(written(tmp_path, {"b": "/loras/b", "a": "own/a"}), model="llama")
    assert adapters.select("b") == LoraAdapter(1, "b", "/loras/b")
    assert adapters.select("a") == LoraAdapter(2, "a", str(tmp_path / "own" / "a"))


@pytest.mark.parametrize("name", ["c", 5, None, ["a"]])
def test_an_unknown_adapter_is_refused_with_tritons_text(tmp_path: Path, name: Any) -> None:
    adapters = read_adapters(written(tmp_path, {"b": "x", "a": "y"}), model="llama")
    with pytest.raises(LoraRefusal) as caught:
        adapters.select(name)
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (
        f"LoRA {name} is not supported, we currently support ['b', 'a']"
    )


def test_a_model_without_lora_says_so() -> None:
    with pytest.raises(LoraRefusal, match=r"^LoRA feature is not enabled\.$"):
        LoraAdapters().select("a")


@pytest.mark.parametrize("content", [["a"], {"a": 1}, "{"])
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(InferenceError, match=r"model 'llama': its multi_lora\.json"):
        read_adapters(written(tmp_path, content), model="llama")


def test_a_missing_file_is_named_without_its_folder(tmp_path: Path) -> None:
    with pytest.raises(InferenceError) as caught:
        read_adapters(tmp_path, model="llama")
    assert "has no multi_lora.json" in caught.value.message
    assert str(tmp_path) not in caught.value.message
