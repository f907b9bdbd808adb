"""A model file is found in its model's folder, and drafted into a configuration that loads."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.backend import Backend, Description, Instance, ModelContext
from gateway.backend_loader import BackendLoader
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.config.pbtxt import parse
from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError
from gateway.models.config_checks import check_tensors
from gateway.models.normalisation import normalise
from gateway.models.repository import ModelRepository
from gateway.tools.draft import DraftFile, draft, find_file, open_file


class Telling(Backend):
    """Says of every file that it has one input and one output, and batches."""

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        return replace(
            config,
            max_batch_size=4,
            input=(ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=(-1, 3)),),
            output=(ModelOutput(name="y", data_type=DataType.TYPE_FP32, dims=(2,)),),
            dynamic_batching=DynamicBatching(preferred_batch_size=(4,)),
        )

    async def load(self, context: ModelContext) -> Instance:
        raise AssertionError("a draft loads nothing")


class Reticent(Telling):
    """Knows of nothing but a name."""

    def describe(self, config: ModelConfig, path: Path) -> Description:
        found = replace(config, input=(ModelInput(name="x"),))
        return Description(found, {"x": "nobody knows"})


class Loader(BackendLoader):
    """A loader whose every backend is the one given."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def get(self, name: str) -> Backend:
        return self._backend


def repository(folder: Path, files: Sequence[str]) -> ModelRepository:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return ModelRepository([folder])


def found(file: DraftFile) -> tuple[str, str, str, str]:
    return file.model, file.folder.name, file.filename, file.platform.backend


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["m/1/model.onnx"], ("m", "1", "model.onnx", "onnxruntime")),
        (["m/1/model.onnx/model.onnx"], ("m", "1", "model.onnx", "onnxruntime")),
        (["m/2/model.pt", "m/10/model.pt2", "m/x/a"], ("m", "10", "model.pt2", "pytorch")),
        (["m/1/resnet.onnx", "m/1/labels.txt"], ("m", "1", "resnet.onnx", "onnxruntime")),
        (["m/1/model.onnx", "m/1/other.onnx"], ("m", "1", "model.onnx", "onnxruntime")),
        (["m/1/model.py", "m/1/helper.py"], ("m", "1", "model.py", "python")),
    ],
)
def test_the_file_of_the_highest_version_is_found(
    files: list[str], expected: tuple[str, ...], tmp_path: Path
) -> None:
    assert found(find_file(repository(tmp_path, files), "m")) == expected


@pytest.mark.parametrize(
    ("files", "code", "text"),
    [
        (["a/1/x", "b/1/x"], Code.NOT_FOUND, "model 'm' is not in any repository; found: a, b"),
        ([], Code.NOT_FOUND, "found: none"),
        (["m/config.pbtxt"], Code.INVALID_ARG, "model 'm' has no version; expected a folder 'm/1'"),
        (["m/1/weights.bin"], Code.NOT_FOUND, "'m/1' holds no model file; expected model.savedmo"),
        (
            ["m/1/model.onnx", "m/1/model.pt"],
            Code.INVALID_ARG,
            "'m/1' holds several model files: model.onnx, model.pt; give the path of one of them",
        ),
        (["m/1/a.onnx", "m/1/b.onnx"], Code.INVALID_ARG, "several model files: a.onnx, b.onnx"),
        (["m/1/helper.py"], Code.NOT_FOUND, "holds no model file"),
    ],
)
def test_a_model_without_exactly_one_file_is_refused(
    files: list[str], code: Code, text: str, tmp_path: Path
) -> None:
    with pytest.raises(InferenceError) as refused:
        find_file(repository(tmp_path, files), "m")
    assert refused.value.code is code
    assert text in refused.value.message


def test_a_path_is_a_model_of_a_repository_or_stands_alone(tmp_path: Path) -> None:
    repository(tmp_path, ["m/3/net.onnx", "loose.pt", "notes.txt"])
    inside = open_file(tmp_path / "m" / "3" / "net.onnx")
    assert (found(inside), inside.home) == (("m", "3", "net.onnx", "onnxruntime"), tmp_path / "m")
    loose = open_file(tmp_path / "loose.pt")
    assert (loose.model, loose.filename, loose.home) == ("loose", "loose.pt", None)
    with pytest.raises(InferenceError, match=r"'no\.pt' does not exist"):
        open_file(tmp_path / "no.pt")
    with pytest.raises(InferenceError, match=r"'notes\.txt' is no model file; expected"):
        open_file(tmp_path / "notes.txt")


@pytest.mark.parametrize("filename", ["model.onnx", "net.onnx"])
def test_a_draft_reads_back_as_what_the_backend_said(filename: str, tmp_path: Path) -> None:
    repository(tmp_path, [f"m/1/{filename}"])
    made = draft(open_file(tmp_path / "m" / "1" / filename), Loader(Telling()))
    assert made.path == tmp_path / "m" / "config.pbtxt"
    written = parse(made.text, "m/config.pbtxt")
    assert written.default_model_filename == ("" if filename == "model.onnx" else filename)
    config = normalise(written, "m", {filename})
    check_tensors(config)
    said = Telling().complete(ModelConfig(), tmp_path)
    assert (config.backend, config.platform) == ("onnxruntime", "onnxruntime_onnx")
    assert (config.input, config.output) == (said.input, said.output)
    assert config.max_batch_size == 4
    assert config.dynamic_batching == said.dynamic_batching
    assert [group.count for group in config.instance_group] == [1]


def test_a_draft_of_what_is_not_known_reads_but_does_not_pass(tmp_path: Path) -> None:
    (tmp_path / "loose.pt").touch()
    made = draft(open_file(tmp_path / "loose.pt"), Loader(Reticent()))
    assert made.path is None
    assert "# nobody knows: fill in both" in made.text
    assert "# The file does not tell the outputs of the model" in made.text
    with pytest.raises(InferenceError, match="model input 'x' must specify 'data_type'"):
        check_tensors(normalise(parse(made.text, "loose"), "loose"))


def test_a_runtime_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.startswith("backends.tensorflow"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    (tmp_path / "model.graphdef").touch()
    with pytest.raises(InferenceError, match=r"pip install 'sluice\[tensorflow\]'"):
        draft(open_file(tmp_path / "model.graphdef"), BackendLoader())
