"""The parts of the check: what each asks, needs, and how long it may take.

This module and `needs` import nothing but Python's own, since anything else may be missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

CORE = ("filelock", "google.protobuf", "numpy", "orjson", "prometheus_client", "rich", "uvloop")
"""What the gateway inside a program needs, and the check itself."""
WIRES = (
    *("fastapi", "fastapi_offline", "grpc", "grpc_health", "grpc_reflection", "httptools"),
    *("httpunk", "markdown_it", "packaging", "sse_starlette", "starlette", "uvicorn"),
)
"""What a gateway that listens needs beside that."""
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
