"""The process of one probe, which may crash or hang.

It is started as `python -m gateway.tools.doctor.probe_process KIND NAME`. Runtimes are imported by
name here, and nowhere else in the gateway.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from gateway.backend_loader import BackendLoader
from gateway.errors import InferenceError

Told = Mapping[str, Any]


def main() -> None:
    """Write the result as JSON to stdout; output of libraries is redirected to stderr."""
    answers = os.dup(1)
    os.dup2(2, 1)
    kind, *names = sys.argv[1:]
    told = KINDS[kind](*names)
    os.write(answers, json.dumps(told).encode())
    # Without clean-up: threads or exit handlers of a runtime could still hang or crash.
    os._exit(0)


def backend(name: str) -> Told:
    """Create a backend; its facts about this machine."""
    try:
        created = BackendLoader().get(name)
    except InferenceError as error:
        return {"error": str(error)}
    return {"facts": [asdict(fact) for fact in created.facts]}


def torch() -> Told:
    """Torch's CUDA version, architectures, and compute capabilities of GPUs."""

    library = importlib.import_module("torch")
    cuda = library.cuda
    count = cuda.device_count() if cuda.is_available() else 0
    return {
        "cuda": library.version.cuda,
        "capabilities": [list(cuda.get_device_capability(index)) for index in range(count)],
        "architectures": cuda.get_arch_list(),
    }


def onnxruntime() -> Told:
    """The execution providers that ONNX Runtime was built with."""
    return {"providers": importlib.import_module("onnxruntime").get_available_providers()}


def nvml() -> Told:
    """The driver and the GPUs, by NVML; `missing` without its Python package."""
    try:
        library = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return {"missing": True}
    try:
        library.nvmlInit()
        count = library.nvmlDeviceGetCount()
        return {
            "driver": _text(library.nvmlSystemGetDriverVersion()),
            "cuda": library.nvmlSystemGetCudaDriverVersion(),
            "gpus": [_gpu(library, index) for index in range(count)],
        }
    except library.NVMLError as error:
        return {"error": str(error)}


def _gpu(library: Any, index: int) -> Told:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    return {
        "name": _text(library.nvmlDeviceGetName(handle)),
        "total": memory.total,
        "used": memory.used,
        "capability": list(library.nvmlDeviceGetCudaComputeCapability(handle)),
    }


def _text(found: str | bytes) -> str:
    return found.decode() if isinstance(found, bytes) else found


KINDS: Mapping[str, Callable[..., Told]] = {
    "backend": backend,
    "torch": torch,
    "onnxruntime": onnxruntime,
    "nvml": nvml,
}

if __name__ == "__main__":
    main()
