"""The weights and settings of a version folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import triton_python_backend_utils as pb_utils
from sluice_llm.request import Mistake

from backends.openvino_genai.worker.sluice_openvino_genai.compiling import tiny_gguf
from backends.openvino_genai.worker.sluice_openvino_genai.model_file import read_model_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.gguf").write_bytes(tiny_gguf())
    return tmp_path


def settings(folder: Path, content: Any) -> None:
    (folder / "model.json").write_text(json.dumps(content))


def test_a_folder_with_one_file_needs_no_settings(folder: Path) -> None:
    found = read_model_file(folder, "model.json", "")
    assert (found.weights, found.max_length) == (folder / "tiny.gguf", 64)
    assert (found.scheduler["cache_size"], found.scheduler["max_num_batched_tokens"]) == (1, 256)
    assert found.properties == {"INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False}


def test_settings_override_defaults_by_the_librarys_names(folder: Path) -> None:
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "f16"}
    settings(folder, {"num_kv_blocks": 64, "max_model_len": 32, "properties": properties})
    found = read_model_file(folder, "model.json", "")
    assert (found.scheduler["num_kv_blocks"], found.scheduler["cache_size"]) == (64, 0)
    assert found.max_length == 32
    assert found.properties == {**properties, "ENABLE_CPU_PINNING": False}


def test_the_stored_model_is_used_by_its_name(folder: Path, tmp_path: Path) -> None:
    version = tmp_path / "1"
    version.mkdir()
    settings(version, {"model": "tiny"})
    assert read_model_file(version, "model.json", str(folder)).weights == folder / "tiny.gguf"
    with pytest.raises(Mistake, match="has the model 'tiny', which is neither in its version"):
        read_model_file(version, "model.json", "")


def test_an_exported_folder_needs_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").touch()
    with pytest.raises(Mistake, match=r"has openvino_model\.xml but no openvino_tokenizer\.xml"):
        read_model_file(tmp_path, "model.json", "")
    (tmp_path / "openvino_tokenizer.xml").touch()
    (tmp_path / "openvino_detokenizer.xml").touch()
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    found = read_model_file(tmp_path, "model.json", "")
    assert (found.weights, found.max_length) == (tmp_path, 2048)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ([], "must be an object, found list"),
        ({"tensor_parallel_size": 2}, "has the key 'tensor_parallel_size', expected one of model"),
        ({"model": 3}, "has the model 3, expected a name"),
        ({"max_num_seqs": 0}, "has max_num_seqs 0, expected a whole number from 1"),
        ({"enable_prefix_caching": "yes"}, "expected true or false"),
        ({"cache_size": 0}, "has no room for a cache"),
        ({"properties": {"enable_save_ov_model": True}}, "which writes files of its own"),
        ({"properties": {"INFERENCE_PRECISION_HINT": "f16"}}, "'f16', expected f32 or bf16"),
        ({"properties": 1}, "expected an object"),
    ],
)
def test_wrong_settings_are_refused(folder: Path, content: Any, error: str) -> None:
    settings(folder, content)
    with pytest.raises(Mistake, match=error):
        read_model_file(folder, "model.json", "")


def test_several_files_or_none_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "other.gguf").touch()
    with pytest.raises(Mistake, match="has 2 GGUF files; name one"):
        read_model_file(folder, "model.json", "")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Mistake, match="has neither a GGUF file nor openvino_model"):
        read_model_file(tmp_path / "empty", "model.json", "")


def test_types_that_the_library_reads_wrongly_are_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(pb_utils.Logger, "log_warn", said.append)
    content = tiny_gguf()
    name = b"blk.0.attn_q.weight"
    at = content.index(name) + len(name) + 4 + 16
    (folder / "tiny.gguf").write_bytes(content[:at] + b"\x03" + content[at + 1 :])
    read_model_file(folder, "model.json", "")
    (line,) = said
    assert "Q4_1" in line
    assert "about 8 %" in line
