"""What the backend adds to a config, without starting anything."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from backends.vllm.backend import VllmBackend
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
from gateway.data_type import DataType
from gateway.errors import InferenceError
from gateway.generation import INPUTS, OUTPUTS
from gateway.openai_exchange import serves_openai

LLAMA = ModelConfig(name="llama", backend="vllm")
RUNTIME = "backends.vllm.opening"
"""The module that imports all of vLLM."""


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """vLLM is not imported; the models that it would be asked to start."""
    asked: list[str] = []

    async def open_instance(model: Any, context: ModelContext) -> str:
        asked.append(context.config.name)
        return "an instance"

    module = ModuleType(RUNTIME)
    module.open_instance = open_instance  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, RUNTIME, module)
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


async def test_all_of_vllm_is_imported_when_the_backend_is_created(
    runtime: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = VllmBackend()
    monkeypatch.delitem(sys.modules, RUNTIME)
    (tmp_path / "model.json").write_text('{"model": "anywhere/anything"}')
    context = ModelContext(
        config=backend.complete(LLAMA, tmp_path),
        path=tmp_path,
        store=tmp_path,
        infer=_ask_nobody,
        wasted=lambda tokens: None,
    )
    assert await backend.load(context) == "an instance"
    assert runtime == ["llama"]
    assert RUNTIME not in sys.modules


def test_without_vllm_the_backend_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, RUNTIME, None)
    with pytest.raises(InferenceError, match=r"backend 'vllm' cannot be imported: .+; install"):
        BackendLoader().get("vllm")


def _ask_nobody(request: Any) -> Any:
    raise AssertionError("an engine asks no other model")
