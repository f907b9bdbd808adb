"""The fields that the backend adds to a config, without starting anything."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from backends.vllm.backend import VllmBackend
from backends.vllm.settings import EngineModel
from gateway.backend import ModelContext
from gateway.backend_loader import BackendLoader
from gateway.config import (
    InstanceGroup,
    InstanceKind,
    ModelConfig,
    ModelInput,
    ModelOutput,
    TransactionPolicy,
)
from gateway.config.data_type import DataType
from gateway.errors import InferenceError
from gateway.generation import INPUTS, OUTPUTS
from gateway.openai_contract import serves_openai

LLAMA = ModelConfig(name="llama", backend="vllm")
RUNTIME = {
    "backends.vllm.opening": "open_instance",
    "backends.vllm.engine_clients.instance": "open_shared",
}
"""The modules that import all of vLLM, and what each has that starts an engine."""


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """vLLM is not imported; the models that it would be asked to start."""
    asked: list[str] = []

    def opener(name: str) -> Any:
        async def opened(model: EngineModel, wasted: Any) -> str:
            asked.append(f"{name} {model.name} {model.clients}")
            return "an instance"

        return opened

    for path, name in RUNTIME.items():
        module = ModuleType(path)
        setattr(module, name, opener(name))
        monkeypatch.setitem(sys.modules, path, module)
    return asked


def complete(config: ModelConfig) -> ModelConfig:
    return VllmBackend().complete(config, Path())


def test_an_empty_config_gets_the_whole_contract() -> None:
    config = complete(LLAMA)
    assert (config.input, config.output) == (INPUTS, OUTPUTS)
    assert config.decoupled
    assert serves_openai(config)
    assert config.max_batch_size == 0
    assert [group.kind for group in config.instance_group] == [InstanceKind.KIND_MODEL]


def test_what_a_config_lists_stays_and_comes_first() -> None:
    mine = ModelInput(name="stream", data_type=DataType.TYPE_BOOL, dims=(1,))
    extra = ModelOutput(name="extra", data_type=DataType.TYPE_INT8, dims=(1,))
    config = complete(replace(LLAMA, input=(mine,), output=(extra,)))
    assert config.input[0] is mine
    assert sorted(each.name for each in config.input) == sorted(each.name for each in INPUTS)
    assert config.output == (extra, *OUTPUTS)


def test_a_config_that_is_complete_is_not_changed() -> None:
    config = complete(LLAMA)
    assert complete(config) == config


def test_the_policy_becomes_decoupled() -> None:
    config = replace(LLAMA, model_transaction_policy=TransactionPolicy(decoupled=False))
    assert complete(config).decoupled


def test_more_than_one_instance_is_refused() -> None:
    groups = (InstanceGroup(kind=InstanceKind.KIND_MODEL, count=2),)
    with pytest.raises(InferenceError, match="ask for 2 instances, expected 1"):
        complete(replace(LLAMA, instance_group=groups))


def context(folder: Path, text: str = '{"model": "anywhere/anything"}') -> ModelContext:
    """A version folder whose `model.json` has a text."""
    (folder / "model.json").write_text(text)
    return ModelContext(
        config=complete(LLAMA),
        path=folder,
        store=folder,
        infer=_ask_no_model,
        wasted=lambda tokens: None,
    )


async def test_all_of_vllm_is_imported_when_the_backend_is_created(
    runtime: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend, asked = VllmBackend(), context(tmp_path)
    for path in RUNTIME:
        monkeypatch.delitem(sys.modules, path)
    assert await backend.load(asked) == "an instance"
    assert runtime == ["open_instance llama 1"]
    assert not RUNTIME.keys() & sys.modules.keys()


@pytest.mark.parametrize(
    ("frontends", "text", "started"),
    [
        ("0", '{"model": "m"}', "open_instance llama 1"),
        ("1", '{"model": "m"}', "open_instance llama 1"),
        ("3", '{"model": "m"}', "open_shared llama 3"),
        ("65", '{"model": "m"}', "open_shared llama 64"),
        ("3", '{"model": "m", "mm_tensor_ipc": "torch_shm"}', "open_instance llama 1"),
        ("3", '{"model": "m", "api_server_count": 1}', "open_instance llama 1"),
        ("0", '{"model": "m", "api_server_count": 2}', "open_shared llama 2"),
    ],
)
async def test_an_engine_has_as_many_clients_as_there_are_frontends_or_its_file_says(
    runtime: list[str], tmp_path: Path, frontends: str, text: str, started: str
) -> None:
    backend = VllmBackend()
    backend.settings = {"frontends": frontends}
    assert await backend.load(context(tmp_path, text)) == "an instance"
    assert runtime == [started]


async def test_the_ray_workers_of_an_engine_have_the_group_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, opened = VllmBackend(), []

    async def open_instance(model: EngineModel, wasted: Any) -> Any:
        opened.append(model.placement_group)

    monkeypatch.setattr(backend, "_open", open_instance)
    backend.settings = {"placement-group": "0a0b"}
    await backend.load(context(tmp_path))
    assert opened == ["0a0b"]


@pytest.mark.parametrize("count", ["-1", "65", '"2"', "1.5", "true"])
async def test_a_count_of_clients_that_cannot_be_is_refused(tmp_path: Path, count: str) -> None:
    text = f'{{"model": "m", "api_server_count": {count}}}'
    with pytest.raises(InferenceError, match=r"api_server_count .+ from 1 to 64"):
        await VllmBackend().load(context(tmp_path, text))


async def test_tensors_in_torchs_shared_memory_have_one_client(tmp_path: Path) -> None:
    text = '{"model": "m", "mm_tensor_ipc": "torch_shm", "api_server_count": 2}'
    with pytest.raises(InferenceError, match=r"'torch_shm', which needs api_server_count 1"):
        await VllmBackend().load(context(tmp_path, text))


def test_without_vllm_the_backend_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "backends.vllm.opening", None)
    with pytest.raises(InferenceError, match=r"backend 'vllm' cannot be imported: .+; install"):
        BackendLoader().get("vllm")


def _ask_no_model(request: Any) -> Any:
    raise AssertionError("an engine asks no other model")
