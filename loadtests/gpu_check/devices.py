"""GPU memory and metrics: CUDA shared memory of clients, and nv_gpu_* compared with NVML."""

import base64
import ctypes
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import orjson

from gateway.cuda_driver import Device, call, device, load_driver
from gateway.in_process import server as in_process
from gateway.shared_memory.cuda import HANDLE_BYTES
from loadtests.gpu_check.check import Row, Skipped
from loadtests.gpu_check.parts import Asked, why_none
from loadtests.support import servers
from loadtests.support.results import Better
from loadtests.support.servers import Cpus, LoadTestFailed, Server, serving, total

BYTES = 4 << 20
ELEMENTS = BYTES // 4
ECHO, NEGATE = "echo", "negate"
CONFIG = """
backend: "%s"
max_batch_size: 0
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


def check_cuda_shared_memory(asked: Asked) -> Sequence[Row]:
    """Inputs and outputs in a client's GPU memory, of a model on the host and one on the GPU."""
    if reason := why_none():
        raise Skipped(reason)
    driver, gpu = load_driver(), device(0)
    call(driver, "cuCtxSetCurrent", gpu.context)
    with tempfile.TemporaryDirectory() as folder:
        models = _write_models(Path(folder))
        contender = servers.gateway(Path(folder), servers.GATEWAY, "--allow-client-shm=true")
        with serving(contender.launch(), Cpus()) as server:
            regions = {name: _region(server, driver, name) for name in ("given", "taken")}
            rows = [row for each in models for row in _check(server, each, gpu, regions, asked)]
            for name in regions:
                _post(server, f"/v2/cudasharedmemory/region/{name}/unregister", {})
    return rows


def _write_models(folder: Path) -> Sequence[str]:
    """The names of the models; without Torch for GPUs only the one on the host."""
    echo = CONFIG.replace("OUTPUT__0", "INPUT__0") % "identity"
    _write(folder / ECHO, echo)
    try:
        import torch
    except ImportError:
        return [ECHO]
    if not torch.cuda.is_available():
        return [ECHO]
    _write(folder / NEGATE, CONFIG % "pytorch")
    network = torch.jit.trace(torch.neg, torch.zeros(1))
    network.save(str(folder / NEGATE / "1" / "model.pt"))
    return [ECHO, NEGATE]


def _write(folder: Path, config: str) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)


def _check(
    server: Server, model: str, gpu: Device, regions: Mapping[str, int], asked: Asked
) -> Sequence[Row]:
    sent = np.random.default_rng(5).standard_normal(ELEMENTS, dtype=np.float32)
    gpu.write(regions["given"], sent.tobytes())
    gpu.write(regions["taken"], bytes(BYTES))
    _infer(server, model)
    expected = sent if model == ECHO else -sent
    wrong = _differing(expected.tobytes(), gpu.read(regions["taken"], BYTES))
    return [
        Row(
            name=f"{model}: bytes of {BYTES} that came out wrong",
            gateway=wrong,
            ok=wrong == 0,
            expected="0",
        ),
        Row(
            name=f"{model}: infer/s, 4 MiB in and out, 1 client",
            gateway=_rate(server, model, asked.secs),
            better=Better.HIGHER,
        ),
    ]


def _differing(sent: bytes, found: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(sent, np.uint8) != np.frombuffer(found, np.uint8)))


def _region(server: Server, driver: Any, name: str) -> int:
    """The address of new memory of this process on the GPU, registered at the server."""
    address = ctypes.c_uint64()
    call(driver, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(BYTES))
    handle = (ctypes.c_ubyte * HANDLE_BYTES)()
    call(driver, "cuIpcGetMemHandle", ctypes.byref(handle), address)
    raw = {"b64": base64.b64encode(bytes(handle)).decode()}
    body = {"raw_handle": raw, "device_id": 0, "byte_size": BYTES}
    _post(server, f"/v2/cudasharedmemory/region/{name}/register", body)
    return address.value


def _infer(server: Server, model: str) -> None:
    given, taken = (
        {"shared_memory_region": name, "shared_memory_byte_size": BYTES}
        for name in ("given", "taken")
    )
    x = {"name": "INPUT__0", "datatype": "FP32", "shape": [ELEMENTS], "parameters": given}
    y = {"name": "INPUT__0" if model == ECHO else "OUTPUT__0", "parameters": taken}
    _post(server, f"/v2/models/{model}/infer", {"inputs": [x], "outputs": [y]})


def _rate(server: Server, model: str, secs: float) -> float:
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < secs:
        _infer(server, model)
        count += 1
    return count / (time.perf_counter() - began)


def _post(server: Server, path: str, body: Mapping[str, Any]) -> None:
    url = f"http://127.0.0.1:{server.ports.http}{path}"
    try:
        with urlopen(Request(url, orjson.dumps(body), method="POST"), timeout=30) as response:
            response.read()
    except HTTPError as error:
        raise LoadTestFailed(f"{path} answered {error.code}: {error.read().decode()}") from None


GIB = 1 << 30
SLACK_BYTES = 256 << 20
MILLI = 1000
USED, TOTAL = "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"
# A value that a card lacks has no series, and is not checked.
UTILIZATION, ENERGY = "nv_gpu_utilization", "nv_energy_consumption"
POWER, LIMIT = "nv_gpu_power_usage", "nv_gpu_power_limit"
LOAD_SECS = 3.0
SIDE = 8192


def check_gpu_metrics(asked: Asked) -> Sequence[Row]:
    """One GPU under a load of matrix products, with a GiB and more of its memory in use."""
    import pynvml
    import torch

    if not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} sees no GPU: a build for the CPU?")
    pynvml.nvmlInit()
    # NVML ignores CUDA_VISIBLE_DEVICES, so its first GPU may be another one than Torch's.
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    uuid = pynvml.nvmlDeviceGetUUID(gpu)
    with (
        tempfile.TemporaryDirectory() as empty,
        in_process.Server(model_repository=empty, model_control_mode="explicit") as server,
    ):
        torch.zeros(1, device="cuda")  # the memory of CUDA itself
        before = _read(server, uuid)
        held = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
        under_load = _under_load(torch, lambda: _read(server, uuid))
        used = pynvml.nvmlDeviceGetMemoryInfo(gpu).used
        after = _read(server, uuid)
        del held
    return [*_changes(before, under_load, after), *_agreements(pynvml, gpu, used, after)]


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


def _agreements(pynvml: Any, gpu: object, used: float, after: Mapping[str, float]) -> Iterator[Row]:
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


def _under_load(torch: Any, read: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
    """The metrics while the GPU has been busy for some seconds."""
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


def _read(server: in_process.Server, uuid: str | bytes) -> Mapping[str, float]:
    ours = uuid.decode() if isinstance(uuid, bytes) else uuid
    lines = [line for line in server.metrics().splitlines() if f'gpu_uuid="{ours}"' in line]
    names = {line.partition("{")[0] for line in lines}
    return {name: total(lines, name) for name in names}
