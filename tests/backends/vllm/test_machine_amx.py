"""No process of vLLM uses its kernels for AMX."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

PROGRAM = """
from vllm.plugins import load_general_plugins
load_general_plugins()
import torch
print(torch.cpu._is_amx_tile_supported())
"""


def test_a_process_of_vllm_finds_no_amx() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=100
    )
    assert found.stdout.splitlines()[-1] == "False"
