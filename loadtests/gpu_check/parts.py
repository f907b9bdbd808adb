"""The parts of the check: the needs and time limit of each, and the GPUs of the machine.

This module imports only the standard library, since any package may be missing.
"""

import argparse
import ctypes
import importlib
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gateway.cuda_driver import CudaFailed, call, gpu_count, load_driver

CORE = ("filelock", "google.protobuf", "numpy", "orjson", "rich", "uvloop")
"""The packages of the gateway inside a program, and of the check itself."""
WIRES = (
    *("fastapi", "fastapi_offline", "grpc", "grpc_health", "grpc_reflection", "httptools"),
    *("httpunk", "markdown_it", "packaging", "starlette", "uvicorn"),
)
"""Further packages of a gateway that listens."""
LLM = ("torch", "transformers", "tokenizers", "vllm")

LONGEST_NAME = 256
EXIT_FAILED = 1


def gpu_check(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Print the missing packages, and check; without the packages of all parts, fail."""
    lacking = missing(dict.fromkeys(need for part in PARTS for need in part.needs))
    if lacking:
        sys.stderr.write(f"gpu_check: not installed: {', '.join(lacking)}\n")
    if needed := missing(CORE):
        sys.stderr.write(
            f"gpu_check: nothing can be checked without {', '.join(needed)}: "
            f"pip install {' '.join(needed)}\n"
        )
        raise SystemExit(EXIT_FAILED)
    importlib.import_module("loadtests.gpu_check.check").check(parser, arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A function `check_NAME(asked)` of a module here, which returns rows or raises Skipped."""

    name: str
    module: str
    asks: str
    needs: Sequence[str]
    limit_secs: float
    only_gpu: bool = False


PARTS = (
    Part(
        name="pytorch",
        module="tensors",
        asks="Torch: the same as on the CPU, infer/s",
        needs=(*CORE, "torch"),
        limit_secs=90,
    ),
    Part(
        name="onnxruntime",
        module="tensors",
        asks="ONNX Runtime: the same as on the CPU, infer/s",
        needs=(*CORE, "onnx", "onnxruntime"),
        limit_secs=60,
    ),
    Part(
        name="tensorrt",
        module="tensors",
        asks="TensorRT: the same as on the CPU, infer/s",
        needs=(*CORE, "tensorrt", "cuda.bindings"),
        limit_secs=90,
        only_gpu=True,
    ),
    Part(
        name="gpu_metrics",
        module="devices",
        asks="nv_gpu_* change, and agree with NVML",
        needs=(*CORE, "torch", "pynvml"),
        limit_secs=45,
        only_gpu=True,
    ),
    Part(
        name="cuda_shared_memory",
        module="devices",
        asks="CUDA shared memory in and out",
        needs=(*CORE, *WIRES),
        limit_secs=45,
        only_gpu=True,
    ),
    Part(
        name="generation",
        module="llm",
        asks="vLLM: tokens/s by the gateway and alone",
        needs=(*CORE, *WIRES, *LLM),
        limit_secs=330,
    ),
    Part(
        name="engine_death",
        module="llm",
        asks="vLLM's engine killed under load",
        needs=(*CORE, *WIRES, *LLM),
        limit_secs=400,
    ),
)


CUDA = "cuda"
CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The device, and the amounts: streams and tokens of LLMs, seconds of each rate."""

    device: str
    streams: Sequence[int]
    max_tokens: int
    secs: float

    @property
    def kind(self) -> str:
        """The kind of instances of tensor models."""
        return "KIND_GPU" if self.device == CUDA else "KIND_CPU"

    def as_json(self) -> dict[str, Any]:
        """For the command line of a part."""
        return asdict(self)


DISTRIBUTIONS = {
    "cuda.bindings": "cuda-bindings",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "markdown_it": "markdown-it-py",
    "pynvml": "nvidia-ml-py",
}
"""The distribution of each module with another name."""


def missing(modules: Iterable[str]) -> Sequence[str]:
    """The distributions of missing modules; none is imported."""
    return [_distribution(module) for module in modules if not _is_there(module)]


def _distribution(module: str) -> str:
    return DISTRIBUTIONS.get(module, module.replace("_", "-"))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def why_none() -> str:
    """The reason why CUDA cannot be used here; "" if there is a GPU."""
    driver = load_driver()
    if driver is None:
        return "no GPU: the CUDA driver (libcuda.so.1) is not there, or finds no card"
    try:
        return "" if gpu_count(driver) else "no GPU: the CUDA driver reports none"
    except CudaFailed as error:
        return f"no GPU: {error}"


def cards() -> Sequence[str]:
    """The name of each GPU."""
    if why_none():
        return []
    driver = load_driver()
    return [_name(driver, index) for index in range(gpu_count(driver))]


def _name(driver: Any, index: int) -> str:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(LONGEST_NAME)
    call(driver, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    call(driver, "cuDeviceGetName", name, ctypes.c_int(LONGEST_NAME), device)
    return name.value.decode(errors="replace")


ROOT = Path(__file__).parents[2]
NAME = "sluice"


def is_installed() -> bool:
    """Sluice is installed in this Python."""
    try:
        importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def write_distribution(folder: Path, project: Path = ROOT / "pyproject.toml") -> None:
    """Write a folder that, on Python's path, declares the entry points of this source."""
    found = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    groups = {"console_scripts": found.get("scripts", {}), **found["entry-points"]}
    info = folder / f"{NAME}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(map(_section, groups, groups.values())))


def _section(group: str, points: Mapping[str, str]) -> str:
    lines = (f"{name} = {value}" for name, value in points.items())
    return "\n".join((f"[{group}]", *lines, ""))
