"""The content of a model's file, and the errors for one that is wrong."""

from pathlib import Path

import pytest
from sluice_llm.request import Mistake, clean

from backends.tensorrtllm.backend import adapter_names
from backends.tensorrtllm.worker.sluice_tensorrtllm.model_file import read_model_file
from gateway.errors import InferenceError


def test_all_but_tritons_key_are_arguments(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(
        "model: org/name\nscheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}\n"
        "triton_config: {decoupled: false, max_batch_size: 4, cancellation_check_period_ms: 50}\n"
    )
    file = read_model_file(tmp_path)
    assert file.arguments == {
        "model": "org/name",
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
    }
    assert (file.decoupled, file.max_batch_size, file.check_secs) == (False, 4, 0.05)


def test_a_model_lies_in_the_version_folder_or_is_the_stored_one(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"model": "weights"}')
    assert read_model_file(tmp_path).arguments["model"] == "weights"
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    assert read_model_file(tmp_path).arguments["model"] == str(tmp_path / "weights")
    (tmp_path / "model.json").write_text("{}")
    assert read_model_file(tmp_path, "/store/m").arguments["model"] == "/store/m"


def test_a_folder_of_weights_needs_no_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_model_file(tmp_path).arguments == {"model": str(tmp_path)}


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("model.yaml", "model: [m\n", "its model.yaml is not valid YAML"),
        ("model.yaml", "- model\n", "its model.yaml must be a mapping of names, found list"),
        ("model.yaml", "backend: pytorch\n", "the key 'model' is missing or no text"),
        (
            "model.yaml",
            "model: m\ntriton_config: {decopled: true}\n",
            "'decopled' in triton_config",
        ),
        ("model.yaml", "model: m\ntriton_config: {decoupled: 1}\n", "1, expected true or false"),
        ("model.json", "{", "its model.json is not valid JSON"),
        ("other.txt", "", "has no model.yaml or model.json"),
    ],
)
def test_a_file_that_is_wrong_is_refused(
    tmp_path: Path, name: str, content: str, text: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(Mistake) as refusal:
        read_model_file(tmp_path)
    assert text in str(refusal.value)
    assert str(tmp_path) not in str(refusal.value)


@pytest.mark.parametrize("name", ["model.yaml", "model.json", "multi_lora.json"])
def test_a_file_that_cannot_be_read_is_named_without_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "model.json").write_text('{"model": "m"}')
    (tmp_path / name).write_text("")
    whole = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(Mistake) as refusal:
        read_model_file(tmp_path)
    assert str(refusal.value) == f"its {name} cannot be read: Permission denied"
    if name == "multi_lora.json":
        with pytest.raises(InferenceError) as error:
            adapter_names("m", tmp_path)
        assert error.value.message == f"model 'm': its {name} cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no file:///srv/a/b here", "no <path> here"),
        ('no "/mnt/my models/llama/x.bin" here', 'no "<path>" here'),
        ("no 'file:///mnt/my models/x' here", "no '<path>' here"),
        ("it's '/mnt/o'brien/x y', isn't it 'a/b'", "it's '<path>', isn't it 'a/b'"),
        ("no \"/mnt/it's mine/x y\" in '/a' or '/b'", "no \"<path>\" in '/a' or '/b'"),
        ("see https://host/a/b", "see https://host/a/b"),
        ("see 'https://host/a/b'", "see 'https://host/a/b'"),
    ],
)
def test_paths_of_the_host_are_removed(text: str, told: str) -> None:
    assert clean(OSError(text)) == told


def test_the_first_of_pydantics_errors_is_reported() -> None:
    class ValidationError(ValueError):
        def errors(self) -> list[dict[str, object]]:
            return [{"loc": ("kv_cache_config", "fraction"), "msg": "Extra inputs"}, {}]

    assert clean(ValidationError("long")) == "'kv_cache_config.fraction': Extra inputs"
    assert clean(OSError("no /srv/secret/engine.so there")) == "no <path> there"
    assert len(clean(ValueError("x" * 5000))) == 1003
