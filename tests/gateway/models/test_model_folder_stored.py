"""A version's files are in its folder, unless its config names a stored model."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models.model_folder import files_folder
from gateway.storage.store import ModelStore


def config(**parameters: str) -> ModelConfig:
    return ModelConfig(name="minilm", parameters=parameters)


def store_tiny(root: Path) -> Path:
    store = ModelStore(root)
    return store.publish("tiny", write, lambda: None)


def write(folder: Path) -> None:
    (folder / "model.onnx").write_text("whole")


def test_without_the_parameter_it_is_the_version_folder(tmp_path: Path) -> None:
    version = tmp_path / "minilm" / "1"
    assert files_folder(config(), version, tmp_path / "models") == version


def test_with_the_parameter_it_is_the_stored_model(tmp_path: Path) -> None:
    stored = store_tiny(tmp_path)
    assert files_folder(config(stored_model="tiny"), tmp_path / "1", tmp_path) == stored


def test_a_version_with_the_models_own_file_keeps_its_folder(tmp_path: Path) -> None:
    stored, version = store_tiny(tmp_path), tmp_path / "tokenizer" / "1"
    named = replace(config(stored_model="tiny"), default_model_filename="model.py")
    assert files_folder(named, version, tmp_path) == stored
    version.mkdir(parents=True)
    (version / "model.py").touch()
    assert files_folder(named, version, tmp_path) == version
    with pytest.raises(InferenceError, match="run: sluice fetch other"):
        files_folder(replace(named, parameters={"stored_model": "other"}), version, tmp_path)


def refusal(name: str, store: Path) -> InferenceError:
    with pytest.raises(InferenceError) as refused:
        files_folder(config(stored_model=name), store / "minilm" / "1", store)
    return refused.value


def test_a_model_that_is_not_stored_is_reported_with_the_command_that_fetches_it(
    tmp_path: Path,
) -> None:
    error = refusal("tiny", tmp_path)
    assert error.code is Code.UNAVAILABLE
    assert "model 'minilm': its parameter 'stored_model' names 'tiny'" in str(error)
    assert str(error).endswith("run: sluice fetch tiny")


def test_a_damaged_model_is_not_served(tmp_path: Path) -> None:
    os.truncate(store_tiny(tmp_path) / "model.onnx", 2)
    assert refusal("tiny", tmp_path).code is Code.UNAVAILABLE


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../tiny", "a/b", "/etc", "tiny/", ".building", "./tiny"]
)
def test_a_name_that_is_a_path_is_refused(tmp_path: Path, name: str) -> None:
    store_tiny(tmp_path)
    error = refusal(name, tmp_path)
    assert error.code is Code.INVALID_ARG
    assert "it names a path" in str(error)


@pytest.mark.parametrize("name", ["tiny\0", "t" * 1000])
def test_a_name_that_no_file_can_have_is_not_stored(tmp_path: Path, name: str) -> None:
    assert refusal(name, tmp_path).code is Code.UNAVAILABLE


def test_no_message_names_a_folder_of_the_host(tmp_path: Path) -> None:
    file = tmp_path / "models"
    file.write_text("a file where the store should be")
    for name in ("tiny", "..", "a/b", "t" * 1000):
        assert str(tmp_path) not in str(refusal(name, file))
