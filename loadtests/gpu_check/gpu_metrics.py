"""The metrics nv_gpu_* under load, compared with NVML."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pynvml
import torch

from gateway.in_process.server import Server
from loadtests.gpu_check.outcome import Row, Skipped
from loadtests.gpu_check.parts import Asked
from loadtests.support.servers import total

GIB = 1 << 30
SLACK_BYTES = 256 << 20
MILLI = 1000
USED, TOTAL = "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"
# A value that a card lacks has no series, and is not checked.
UTILIZATION, ENERGY = "nv_gpu_utilization", "nv_energy_consumption"
POWER, LIMIT = "nv_gpu_power_usage", "nv_gpu_power_limit"
LOAD_SECS = 3.0
SIDE = 8192


def check(asked: Asked) -> Sequence[Row]:
    """One GPU under a load of large products, which takes a GiB and more of its memory."""
    if not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} sees no GPU: a build for the CPU?")
    pynvml.nvmlInit()
    # Torch's first GPU may be another one than NVML's: CUDA_VISIBLE_DEVICES is not NVML's affair.
    uuid = torch.cuda.get_device_properties(0).uuid
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    with (
        tempfile.TemporaryDirectory() as empty,
        Server(model_repository=empty, model_control_mode="explicit") as server,
    ):
        torch.zeros(1, device="cuda")  # what a process takes for CUDA itself
        before = _read(server, gpu)
        held = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
        under_load = _under_load(lambda: _read(server, gpu))
        used = pynvml.nvmlDeviceGetMemoryInfo(gpu).used
        after = _read(server, gpu)
        del held
    return [*_changes(before, under_load, after), *_agreements(gpu, used, after)]


def _changes(
    before: Mapping[str, float], under_load: Mapping[str, float], after: Mapping[str, float]
) -> Iterator[Row]:
    grown = after[USED] - before[USED]
    yield _row("memory used grows with 1 GiB, bytes", grown, grown >= GIB, f"at least {GIB}")
    if UTILIZATION in under_load:
        busy = under_load[UTILIZATION]
        yield _row("utilization under load", busy, 0 < busy <= 1, "above 0, at most 1")
    if ENERGY in under_load:
        joules = under_load[ENERGY] - before[ENERGY]
        yield _row("energy spent under load, J", joules, joules > 0, "above 0")


def _agreements(gpu: object, used: float, after: Mapping[str, float]) -> Iterator[Row]:
    apart = abs(after[USED] - used)
    yield _row("memory used, bytes from NVML", apart, apart <= SLACK_BYTES, f"<= {SLACK_BYTES}")
    memory, found = pynvml.nvmlDeviceGetMemoryInfo(gpu).total, after[TOTAL]
    yield _row("memory in all, bytes", found, found == memory, f"{memory}")
    if LIMIT in after:
        watts, limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / MILLI, after[LIMIT]
        yield _row("power limit, W", limit, limit == watts, f"{watts:g}")
    if POWER in after:
        yield _row("power, W", after[POWER], after[POWER] > 0, "above 0")


def _row(name: str, found: float, ok: bool, expected: str) -> Row:
    return Row(name=name, gateway=found, ok=ok, expected=expected)


def _under_load(read: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
    """What is read while the GPU has been busy for some seconds."""
    matrix = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    began = time.monotonic()
    while time.monotonic() - began < LOAD_SECS:
        for _ in range(10):
            matrix @ matrix
        torch.cuda.synchronize()
    for _ in range(200):  # queued, so that it is busy at this moment, too
        matrix @ matrix
    found = read()
    torch.cuda.synchronize()
    return found


def _read(server: Server, gpu: object) -> Mapping[str, float]:
    uuid = pynvml.nvmlDeviceGetUUID(gpu)
    ours = uuid.decode() if isinstance(uuid, bytes) else uuid
    lines = [line for line in server.metrics().splitlines() if f'gpu_uuid="{ours}"' in line]
    names = {line.partition("{")[0] for line in lines}
    return {name: total(lines, name) for name in names}
