"""Adapters in the real engine."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from backends.vllm.backend import VllmBackend
from gateway.errors import InferenceError
from tests.backends.vllm.conftest import ANSWER, Llama, Write, ask

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
]

LAYERS, WIDTH = 30, 576


def write_adapter(folder: Path, rank: int) -> str:
    """An adapter that turns what the model says into nonsense."""
    folder.mkdir()
    random = np.random.default_rng(7)
    place = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    weights = {
        place.format(layer, side): random.normal(0, 0.5, shape).astype(np.float32)
        for layer in range(LAYERS)
        for side, shape in (("A", (rank, WIDTH)), ("B", (WIDTH, rank)))
    }
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


async def test_a_request_chooses_its_adapter(write: Write, tmp_path: Path) -> None:
    adapters = {"odd": write_adapter(tmp_path / "odd", rank=8)}
    context = write(files={"multi_lora.json": adapters}, enable_lora="true")
    llama = Llama(await VllmBackend().load(context))
    greedy = {"max_tokens": 16, "temperature": 0}
    plain = ask(exclude_input_in_output=True, **greedy)
    odd = ask(exclude_input_in_output=True, sampling_parameters={**greedy, "lora_name": "odd"})
    assert await llama.say(odd) != ANSWER
    assert await llama.say(plain) == ANSWER
    with pytest.raises(InferenceError) as caught:
        await llama.answers(ask(lora_name="even"))
    assert caught.value.message == "LoRA even is not supported, we currently support ['odd']"
    await llama.instance.close()


async def test_an_adapter_that_cannot_be_loaded_fails_the_load(
    write: Write, tmp_path: Path
) -> None:
    adapters = {"wide": write_adapter(tmp_path / "wide", rank=64)}
    context = write(files={"multi_lora.json": adapters}, enable_lora=True, max_lora_rank=16)
    with pytest.raises(InferenceError) as caught:
        await VllmBackend().load(context)
    assert "its adapter 'wide' cannot be loaded" in caught.value.message
    assert "rank 64 is greater than max_lora_rank 16" in caught.value.message
    assert str(tmp_path) not in caught.value.message
