"""Engines on a CPU without AMX or bfloat16, and on a machine that cannot compile C++."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.vllm import machine
from gateway.backend import Fact

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

PROGRAM = """
import json, sysconfig, sys, time
from types import SimpleNamespace
from vllm.plugins import load_general_plugins
if len(sys.argv) > 1:
    sysconfig.get_path = lambda *names: sys.argv[1]
load_general_plugins()
import torch
from backends.vllm.machine import facts

@torch.compile
def double(x):
    compiled.append(torch.compiler.is_compiling())
    return 2 * x

compiled = []
if "off" in facts()[0].found:
    double(torch.ones(1))
found = [[fact.what, fact.found, fact.fix] for fact in facts()]

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

waits = SimpleNamespace(last_read=time.monotonic(), busy_loop_s=1)
began_secs = time.process_time()
while time.monotonic() < waits.last_read + 0.5:
    SpinCondition.wait(waits)
spent_secs = time.process_time() - began_secs
print(json.dumps([*found, compiled, spent_secs, torch.cpu._is_amx_tile_supported()]))
"""


def told(*arguments: str, **environment: str) -> Any:
    """The facts in a process of vLLM, whether a call was compiled, and whether it finds AMX.

    Before the last: the processor time of a wait of half a second.
    """
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return json.loads(ended.stdout.splitlines()[-1])


class Arguments:
    """Engine arguments, and the model configuration that vLLM makes of them."""

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, quantization: str | None = None
    ) -> None:
        self.dtype: Any = "auto"
        self.enforce_eager = False
        self._made = (dtype, quantization)

    def create_model_config(self) -> Any:
        made = type("ModelConfig", (), {})()
        made.dtype, made.quantization = self._made
        return made


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have a CPU with these instructions, on a machine that can compile."""
    monkeypatch.setattr(machine, "missing_build_tools", dict)

    def has(*names: str) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(names, True))

    return has


@pytest.fixture(scope="module")
def without_compiler() -> Any:
    """The facts of a process of vLLM without a compiler."""
    return told(CXX="no-such-compiler")


def test_a_process_of_vllm_finds_no_amx(without_compiler: Any) -> None:
    *_, is_amx_found = without_compiler
    assert is_amx_found is False


def test_a_process_that_waits_for_another_sleeps(without_compiler: Any) -> None:
    *_, spent_secs, _ = without_compiler
    assert spent_secs < 0.25


def test_without_a_compiler_nothing_is_compiled_and_the_package_is_named(
    without_compiler: Any,
) -> None:
    compilation, _, compiled, *_ = without_compiler
    assert compilation[:2] == ["torch.compile", "off: no C++ compiler (no-such-compiler)"]
    assert "apt-get install g++ (Debian" in compilation[2]
    assert compiled == [False]


@pytest.mark.release
def test_without_pythons_headers_nothing_is_compiled_and_the_package_is_named(
    tmp_path: Path,
) -> None:
    compilation, _, compiled, *_ = told(str(tmp_path), CXX=sys.executable)
    assert compilation[1] == f"off: no Python.h in {tmp_path}"
    assert f"python{sys.version_info[0]}.{sys.version_info[1]}-dev (Debian" in compilation[2]
    assert compiled == [False]


@pytest.mark.parametrize("instruction", ["avx512_bf16", "amx_bf16", "bf16"])
def test_a_cpu_with_bfloat16_has_the_data_type_that_vllm_chooses(
    cpu: Any, instruction: str
) -> None:
    cpu("avx2", instruction)
    arguments = Arguments()
    assert machine.fit(arguments, ()) == {}
    assert (arguments.dtype, arguments.enforce_eager) == ("auto", False)
    assert machine.facts()[1].found == f"as vLLM chooses: this CPU has {instruction}"


def test_a_cpu_without_bfloat16_has_float32(cpu: Any) -> None:
    cpu("avx2")
    arguments = Arguments()
    assert machine.fit(arguments, ("model",)) == {
        "data_type": "float32: this CPU has none of avx512_bf16, amx_bf16, bf16"
    }
    assert arguments.dtype == "float32"
    assert machine.facts()[1].fix == ""


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (Arguments(), ("dtype",)),
        (Arguments(torch.float16), ()),
        (Arguments(quantization="gptq"), ()),
    ],
    ids=["given", "float16", "quantized"],
)
def test_other_data_types_stay(cpu: Any, arguments: Arguments, given: Any) -> None:
    cpu("avx2")
    assert machine.fit(arguments, given) == {}
    assert arguments.dtype == "auto"


def test_the_model_is_not_compiled_either(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu("avx512_bf16")
    monkeypatch.setattr(machine, "missing_build_tools", lambda: {"no C++ compiler (g++)": "g++"})
    arguments = Arguments()
    assert machine.fit(arguments, ()) == {"torch_compile": "off: no C++ compiler (g++)"}
    assert arguments.enforce_eager
    assert machine.facts()[0] == Fact(
        "torch.compile",
        "off: no C++ compiler (g++)",
        "for more tokens per second: apt-get install g++ (Debian, Ubuntu), then restart the server",
    )
