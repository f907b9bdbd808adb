"""CUDA shared memory: inputs from a client's GPU memory, and outputs into it."""

import base64
import ctypes
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import orjson

from gateway.cuda_driver import Device, call, device, load_driver
from gateway.shared_memory.cuda import HANDLE_BYTES
from loadtests.gpu_check.outcome import Row, Skipped
from loadtests.gpu_check.parts import Asked, why_none
from loadtests.support import servers
from loadtests.support.rounds import Better, LoadTestFailed
from loadtests.support.servers import Cpus, Server, serving

BYTES = 4 << 20
ELEMENTS = BYTES // 4
ECHO, NEGATE = "echo", "negate"
CONFIG = """
backend: "%s"
max_batch_size: 0
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


def check(asked: Asked) -> Sequence[Row]:
    """A model on the host that echoes, and one of Torch that negates and does so on the GPU."""
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
    """Which models there are: without Torch for GPUs only the first."""
    echo = CONFIG.replace("OUTPUT__0", "INPUT__0") % "identity"
    _write(folder / ECHO, echo)
    try:
        torch = import_module("torch")
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
    """Memory of this process on the GPU, registered; its address here."""
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
