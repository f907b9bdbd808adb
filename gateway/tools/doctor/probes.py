"""Probes: concurrent processes with time limits, for imports that may crash or hang.

A process is started as `python -m gateway.tools.doctor.probes KIND NAME`. It imports runtimes by
name, as no other module of the gateway does.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from gateway.backend_loader import BackendLoader
from gateway.errors import InferenceError
from gateway.processes.module_commands import module_command, module_environment

SIDE_BY_SIDE = 4
PROBE = module_command("gateway.tools.doctor.probes")

Question = tuple[str, ...]
"""The arguments of a probe: its kind and a name."""

Told = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The output of a probe; `failure` is its end if there was no output."""

    told: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""
    secs: float = 0.0
    in_time: bool = True

    @property
    def error(self) -> str:
        """The failure or the error in the output; "" if there is none."""
        return self.failure or str(self.told.get("error", ""))


def ask(
    questions: Sequence[Question],
    limit_secs: float,
    on_answer: Callable[[Question], None],
    probe: Sequence[str] = PROBE,
) -> Mapping[Question, Outcome]:
    """The outcome of every question; `on_answer` is called in this thread as each ends.

    All processes have ended when this returns, also after an interrupt.
    """
    running: set[subprocess.Popen[bytes]] = set()
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        asking = {
            threads.submit(partial(_ask, [*probe, *question], limit_secs, running)): question
            for question in questions
        }
        outcomes = {}
        try:
            for future in as_completed(asking):
                outcomes[asking[future]] = future.result()
                on_answer(asking[future])
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in tuple(running):
                _kill(process)
    return outcomes


def _ask(
    command: Sequence[str], limit_secs: float, running: set[subprocess.Popen[bytes]]
) -> Outcome:
    began = time.monotonic()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=module_environment(),
        start_new_session=True,  # so that `_kill` also ends its children
    ) as process:
        running.add(process)
        try:
            output, errors = process.communicate(timeout=limit_secs)
        except subprocess.TimeoutExpired:
            _kill(process)
            return Outcome(failure=f"does not end within {limit_secs:g} s", in_time=False)
        finally:
            running.discard(process)
    return _outcome(process.returncode, output, errors, time.monotonic() - began)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(status: int, output: bytes, errors: bytes, secs: float) -> Outcome:
    if status == 0:
        return Outcome(json.loads(output), secs=secs)
    lines = errors.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")
    return Outcome(failure=f"{_ending(status)}: {last}", secs=secs)


def _ending(status: int) -> str:
    if status < 0:
        return f"crashes with {signal.Signals(-status).name}"
    return f"fails with status {status}"


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
