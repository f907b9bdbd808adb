"""A repository that is the folder of one model has that model and no other."""

import logging
from pathlib import Path

import pytest

from gateway.errors import Code, InferenceError
from gateway.models.repository import ModelId, ModelRepository
from gateway.models.supported_fields import FieldVerdict
from gateway.tools.check import check
from tests.builders import add_model

BACKEND = 'backend: "python"\n'


def refusal(folder: Path, model_name: str = "") -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        ModelRepository([folder], model_name=model_name)
    assert caught.value.code is Code.INVALID_ARG
    assert str(folder.parent) not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("config", "model_name", "name"),
    [
        (None, "", "models"),
        (BACKEND, "", "models"),
        (BACKEND, "served", "served"),
        (BACKEND + 'name: "named"', "", "named"),
        (BACKEND + 'name: "named"', "served", "served"),
        ("nonsense", "", "models"),
    ],
)
def test_the_name_is_of_the_variable_or_the_config_or_the_folder(
    tmp_path: Path, config: str | None, model_name: str, name: str
) -> None:
    folder = add_model(tmp_path, "models", config, versions=("1", "3", "assets"))
    repository = ModelRepository([folder], model_name=model_name)
    assert repository.names() == (name,)
    assert repository.ids() == repository.named(name) == (ModelId(name),)
    assert repository.find(name).path == folder
    assert repository.find(name).available == (1, 3)
    assert "1/" in repository.snapshot(ModelId(name))


@pytest.mark.parametrize("name", ["1", "assets", "models", ""])
def test_a_folder_of_the_model_is_no_model(tmp_path: Path, name: str) -> None:
    folder = add_model(tmp_path, "models", versions=("1", "assets"))
    repository = ModelRepository([folder], model_name="served")
    assert repository.named(name) == ()
    with pytest.raises(InferenceError) as caught:
        repository.find(name)
    assert caught.value.message == f"model '{name}' is not in any repository"


def test_a_config_without_versions_is_one_model(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "models", versions=())
    repository = ModelRepository([folder])
    assert repository.names() == ("models",)
    with pytest.raises(InferenceError, match="at least one version must be available"):
        repository.find("models").versions(None)


def test_another_name_in_the_config_is_ignored_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = add_model(tmp_path, "models", BACKEND + 'name: "named"')
    with caplog.at_level(logging.WARNING, "sluice.repository"):
        assert ModelRepository([folder], model_name="served").read("served").name == "served"
    [record] = caplog.records
    assert record.getMessage() == "field ignored"
    assert vars(record)["why"] == "the model is served as 'served'"


def test_a_single_model_is_one_of_several_repositories(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "models")
    add_model(tmp_path / "others", "m")
    repository = ModelRepository([folder, tmp_path / "others"], model_name="served")
    assert repository.names() == ("m", "served")
    spaces = ModelRepository([folder], model_name="served", namespacing=True)
    assert spaces.ids() == (ModelId("served", str(folder)),)
    assert spaces.find("served", str(folder)).path == folder


def test_the_relative_path_of_a_model_has_the_name_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(add_model(tmp_path, "here"))
    assert ModelRepository([Path()]).names() == ("here",)


def test_a_config_at_the_top_of_a_repository_is_ignored_as_by_triton(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = add_model(tmp_path, "models", BACKEND, ())
    add_model(folder, "a", BACKEND)
    assert ModelRepository([folder]).names() == ("a",)
    assert "file ignored" in caplog.text


def test_a_model_with_models_in_it_is_refused_by_name(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "models", BACKEND, ("1",))
    add_model(folder, "b", None)
    add_model(folder, "a", BACKEND, ())
    (folder / "assets").mkdir()
    assert refusal(folder).message == (
        "repository 'models' has a config.pbtxt and versions, as the folder of one model; found "
        "models in it, too: a, b; expected one or the other: remove config.pbtxt, or move the "
        "models to a repository of their own"
    )


def test_a_folder_with_a_number_among_models_is_a_model_as_in_triton(tmp_path: Path) -> None:
    for name in ("7", "a"):
        add_model(tmp_path, name)
    (tmp_path / "2024").mkdir()
    assert ModelRepository([tmp_path]).names() == ("2024", "7", "a")


def test_folders_with_numbers_in_a_version_or_a_reserved_folder_are_no_models(
    tmp_path: Path,
) -> None:
    folder = add_model(tmp_path, "models", versions=())
    for inner in ("1/2", "warmup/3", "configs/4"):
        (folder / inner).mkdir(parents=True)
    assert ModelRepository([folder]).names() == ("models",)


@pytest.mark.parametrize("name", ["a/b", "..", ".", "/", " a", "a\nb", "a\udcff"])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    folder = add_model(tmp_path, "models")
    assert refusal(folder, name).message == (
        "the repository is the folder of one model, which is named by the environment variable "
        f"MODEL_NAME: found {name!a}, expected printable characters without '/'"
    )
    add_model(tmp_path / "repository", "m")
    assert ModelRepository([tmp_path / "repository"], model_name=name).names() == ("m",)


def test_a_name_in_the_config_that_is_none_is_refused(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "models", BACKEND + 'name: "../x"')
    assert "named by config.pbtxt: found '../x'" in refusal(folder).message


def test_a_version_without_config_needs_auto_completion(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "models", None)
    (folder / "1" / "model.onnx").touch()
    assert ModelRepository([folder]).read("models").backend == "onnxruntime"
    with pytest.raises(InferenceError) as caught:
        ModelRepository([folder], auto_complete=False).read("models")
    assert caught.value.message.startswith("failed to open text file for read models/config.pbtxt")


def test_check_has_the_fields_of_the_model(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "models", BACKEND + 'name: "named"\nmax_batch_size: 2')
    verdicts = {
        each.field: (each.path, each.verdict, each.why)
        for each in check(ModelRepository([folder], model_name="served"))
    }
    source = "served/config.pbtxt"
    assert verdicts == {
        "backend": (source, FieldVerdict.HONOURED, ""),
        "name": (source, FieldVerdict.IGNORED, "the model is served as 'served'"),
        "max_batch_size": (source, FieldVerdict.HONOURED, ""),
    }
    same = check(ModelRepository([folder]))
    assert {each.verdict for each in same} == {FieldVerdict.HONOURED}
