"""Configs that the backend completes, and models that do not load: one line, without paths."""

import re
import struct
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import httpx
import pytest

from backends.openvino_genai.backend import OpenVinoGenAiBackend
from backends.openvino_genai.worker.sluice_openvino_genai.compiling import tiny_gguf
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.errors import InferenceError
from tests.serving import WAIT_SECS, Serving, serving, write_model

pytestmark = pytest.mark.timeout(120)
BACKEND = 'backend: "openvino_genai"\n'
TINY = tiny_gguf()
FILES: dict[str, tuple[bytes, str]] = {
    "cut": (TINY[: len(TINY) // 2], "is cut short: it has"),
    "header": (TINY[:600], "header is cut short"),
    "pickle": (b"\x80\x04N.", "is no GGUF file: it begins with"),
    "gemma": (TINY.replace(b"llama", b"gemma", 1), "has the architecture 'gemma'"),
    "old": (TINY.replace(struct.pack("<I", 3), struct.pack("<I", 1), 1), "has GGUF version 1"),
}


def test_a_config_gets_the_tensors_of_vllms_contract(tmp_path: Path) -> None:
    config = ModelConfig(name="m", backend="openvino_genai", max_batch_size=4)
    found = OpenVinoGenAiBackend().complete(config, tmp_path)
    names = {each.name for each in found.input}
    assert {"text_input", "messages", "sampling_parameters", "openai_request"} <= names
    assert not {"image", "embedding_request"} & names
    assert (found.decoupled, found.max_batch_size) == (True, 0)
    assert [each.kind for each in found.instance_group] == [InstanceKind.KIND_CPU]
    assert found.output[0].name == "text_output"


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_a_parser_is_refused_by_name(tmp_path: Path, name: str) -> None:
    config = ModelConfig(name="m", backend="openvino_genai", parameters={name: "hermes"})
    with pytest.raises(InferenceError, match=f"parameter '{name}' is 'hermes', expected none"):
        OpenVinoGenAiBackend().complete(config, tmp_path)


@pytest.mark.parametrize(
    ("group", "error"),
    [
        (InstanceGroup(count=2), "has count 2, expected 1"),
        (InstanceGroup(count=1, kind=InstanceKind.KIND_GPU), "is KIND_GPU, expected KIND_CPU"),
    ],
)
def test_an_instance_group_that_cannot_be_served_is_refused(
    tmp_path: Path, group: InstanceGroup, error: str
) -> None:
    config = ModelConfig(name="m", backend="openvino_genai", instance_group=(group,))
    with pytest.raises(InferenceError, match=error):
        OpenVinoGenAiBackend().complete(config, tmp_path)


def test_sluice_doctor_names_the_command_that_installs_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("backends.openvino_genai.backend.version", missing)
    (fact,) = OpenVinoGenAiBackend().facts
    assert (fact.found, fact.fix) == (
        "openvino-genai is not installed",
        "pip install 'sluice[openvino_genai]'",
    )


def test_sluice_doctor_names_a_package_that_the_library_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def installed(name: str) -> str:
        if name == "openvino-tokenizers":
            raise PackageNotFoundError(name)
        return "2026.4"

    monkeypatch.setattr("backends.openvino_genai.backend.version", installed)
    (fact,) = OpenVinoGenAiBackend().facts
    assert fact.found == "openvino-tokenizers is not installed"


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("repository")
    for name, (content, _) in FILES.items():
        write_model(folder, name, BACKEND)
        (folder / name / "1" / "m.gguf").write_bytes(content)
    write_model(folder, "empty", BACKEND)
    write_model(folder, "key", BACKEND)
    (folder / "key" / "1" / "model.json").write_text('{"gpu_memory_utilization": 0.9}')
    write_model(folder, "name", BACKEND)
    (folder / "name" / "1" / "model.json").write_text('{"model": "no-such-model"}')
    write_model(folder, "property", BACKEND)
    (folder / "property" / "1" / "m.gguf").write_bytes(TINY)
    (folder / "property" / "1" / "model.json").write_text('{"properties": {"NO_SUCH": 1}}')
    with serving(folder, "--model-control-mode=explicit") as server:
        yield from opened(server)


def opened(server: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http, timeout=WAIT_SECS) as found:
        yield found


@pytest.mark.parametrize(
    ("model", "error"),
    [
        *((name, error) for name, (_, error) in FILES.items()),
        ("empty", "has neither a GGUF file nor openvino_model.xml"),
        ("key", "has the key 'gpu_memory_utilization', expected one of model, max_model_len"),
        ("name", "has the model 'no-such-model', which is neither in its version folder"),
        ("property", "Unsupported property NO_SUCH by CPU plugin"),
    ],
)
def test_a_model_that_does_not_load_says_why_in_one_line(
    http: httpx.Client, model: str, error: str
) -> None:
    if model == "property":
        pytest.importorskip("openvino_genai")
    answered = http.post(f"/v2/repository/models/{model}/load", json={})
    assert answered.status_code == 400, answered.text
    found = answered.json()["error"].strip()
    assert error in found
    assert f"model '{model}': its" in found
    assert "\n" not in found
    assert not re.search(r"\.cpp|/tmp|/home", found)


def test_a_tiny_model_is_served(tmp_path: Path) -> None:
    pytest.importorskip("openvino_genai")
    write_model(tmp_path, "tiny", BACKEND)
    (tmp_path / "tiny" / "1" / "tiny.gguf").write_bytes(TINY)
    (tmp_path / "tiny" / "1" / "model.json").write_text('{"num_kv_blocks": 8}')
    with serving(tmp_path) as server:
        body = {"text_input": "abc", "parameters": {"max_tokens": 5, "temperature": 0}}
        answered = httpx.post(f"{server.http}/v2/models/tiny/generate", json=body, timeout=30)
        assert answered.status_code == 200, answered.text
        assert answered.json()["text_output"].startswith("abc")
        longer = {"text_input": "abc" * 30}
        refused = httpx.post(f"{server.http}/v2/models/tiny/generate", json=longer, timeout=30)
        assert "expected at most 63: the model's limit of prompt and answer is 64" in refused.text
        stages = ("library imported", "engine started", "tokenizer opened", "engine warmed up")
        shown = [rf'"{each} secs=[0-9.]+ model=tiny instance=tiny_0"' for each in stages]
        assert re.search(".*".join(shown), server.text, re.DOTALL), server.text
