"""Adapters of the model of one layer."""

import json
from pathlib import Path

import numpy as np

from tests.one_layer import LAYERS, WIDTH


def write_adapter(folder: Path, rank: int) -> str:
    """An adapter that turns what the model says into nonsense."""
    from safetensors.numpy import save_file

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
