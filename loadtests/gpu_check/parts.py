"""The parts of the check: what each needs, and its time limit.

This module imports only the standard library, since any package may be missing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

CORE = ("filelock", "google.protobuf", "numpy", "orjson", "prometheus_client", "rich", "uvloop")
"""What the gateway inside a program needs, and the check itself."""
WIRES = (
    *("fastapi", "fastapi_offline", "grpc", "grpc_health", "grpc_reflection", "httptools"),
    *("httpunk", "markdown_it", "packaging", "sse_starlette", "starlette", "uvicorn"),
)
"""Further packages of a gateway that listens."""
LLM = ("torch", "transformers", "tokenizers", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A module of this package whose `check(asked)` gives rows, or raises Skipped."""

    name: str
    asks: str
    needs: Sequence[str]
    limit_secs: float
    only_gpu: bool = False


PARTS = (
    Part(
        name="pytorch",
        asks="Torch: the same as on the CPU, infer/s",
        needs=(*CORE, "torch"),
        limit_secs=90,
    ),
    Part(
        name="onnxruntime",
        asks="ONNX Runtime: the same as on the CPU, infer/s",
        needs=(*CORE, "onnx", "onnxruntime"),
        limit_secs=60,
    ),
    Part(
        name="tensorrt",
        asks="TensorRT: the same as on the CPU, infer/s",
        needs=(*CORE, "tensorrt", "cuda.bindings"),
        limit_secs=90,
        only_gpu=True,
    ),
    Part(
        name="gpu_metrics",
        asks="nv_gpu_* change, and agree with NVML",
        needs=(*CORE, "torch", "pynvml"),
        limit_secs=45,
        only_gpu=True,
    ),
    Part(
        name="cuda_shared_memory",
        asks="CUDA shared memory in and out",
        needs=(*CORE, *WIRES),
        limit_secs=45,
        only_gpu=True,
    ),
    Part(
        name="generation",
        asks="vLLM: tokens/s by the gateway and alone",
        needs=(*CORE, *WIRES, *LLM),
        limit_secs=330,
    ),
    Part(
        name="engine_death",
        asks="vLLM's engine killed under load",
        needs=(*CORE, *WIRES, *LLM),
        limit_secs=400,
    ),
)


CUDA = "cuda"
CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """On which device, and how much: streams and tokens of LLMs, seconds of each rate."""

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
"""By module, where a distribution has a name of its own."""


def missing(modules: Iterable[str]) -> Sequence[str]:
    """The distributions of those modules that are not there; nothing is imported."""
    return [_distribution(module) for module in modules if not _is_there(module)]


def _distribution(module: str) -> str:
    return DISTRIBUTIONS.get(module, module.replace("_", "-"))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
