"""Messages of the clients of engines are read as they were written."""

import pytest

from backends.vllm.engine_clients.messages import (
    ClientSettings,
    Offer,
    read_offer,
    read_settings,
    write,
)
from backends.vllm.settings import (
    EngineModel,
    LoraAdapter,
    LoraAdapters,
    LoraRefusal,
    OpenAiSettings,
)
from gateway.errors import Code
from gateway.processes.error_messages import read_error, write_error

MODEL = EngineModel(
    name="llama",
    version="3",
    arguments={"model": "/store/llama", "seed": 5, "hf_overrides": {"a": [1, None, 0.5]}},
    source="llama",
    local=True,
    folders={"/store": "the model store"},
    cpu_cores=frozenset({0, 3}),
    openai=OpenAiSettings(chat_template="{{ 1 }}", media_domains=("a.org",)),
    other_names=("other",),
    adapters=LoraAdapters({"pirate": LoraAdapter(1, "pirate", "/adapters/pirate")}),
    clients=4,
    triton_metrics=True,
)


@pytest.mark.parametrize(
    "model",
    [MODEL, EngineModel(name="m", version="1", arguments={}, source="m", local=False, folders={})],
)
def test_settings(model: EngineModel) -> None:
    sent = ClientSettings(model, 2, {"input_address": "ipc:///tmp/x"}, 7, 8, "requests", True)
    assert read_settings(write(sent)) == sent


def test_an_offer() -> None:
    assert read_offer(write(Offer(("pirate",), 8192, 64))) == Offer(("pirate",), 8192, 64)


def test_other_errors_keep_code_and_text() -> None:
    found = read_error(write_error(LoraRefusal("LoRA feature is not enabled.")))
    assert (found.code, found.message) == (Code.INVALID_ARG, "LoRA feature is not enabled.")
