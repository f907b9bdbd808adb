"""CUDA shared memory: inputs from a client's GPU memory, and outputs into it."""

import base64
import ctypes
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import orjson

from gateway.cuda_driver import call, load_driver
from gateway.shared_memory.cuda import HANDLE_BYTES, CudaDevice, open_device
from loadtests import contenders
from loadtests.cpus import Cpus
from loadtests.gpu_check.asked import Asked
from loadtests.gpu_check.gpus import why_none
from loadtests.gpu_check.outcome import Row, Skipped
from loadtests.results import Better
from loadtests.rounds import LoadTestFailed
from loadtests.server import Server, serving

BYTES = 4 << 20
ELEMENTS = BYTES // 4
MODEL = "echo"
CONFIG = """
backend: "identity"
max_batch_size: 0
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


def check(asked: Asked) -> Sequence[Row]:
    """A model that echoes, so that what is in one region must be in the other afterwards."""
    if reason := why_none():
        raise Skipped(reason)
    driver = load_driver()
    device = open_device(driver, 0)
    call(driver, "cuCtxSetCurrent", device.context)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MODEL / "1").mkdir(parents=True)
        (Path(folder) / MODEL / "config.pbtxt").write_text(CONFIG)
        contender = contenders.gateway(Path(folder), contenders.GATEWAY, "--allow-client-shm=true")
        with serving(contender.launch(), Cpus()) as server:
            return _check(server, driver, device, asked.secs)


def _check(server: Server, driver: Any, device: CudaDevice, secs: float) -> Sequence[Row]:
    regions = {name: _region(server, driver, name) for name in ("given", "taken")}
    sent = np.random.default_rng(5).standard_normal(ELEMENTS, dtype=np.float32).tobytes()
    device.write(regions["given"], sent)
    device.write(regions["taken"], bytes(BYTES))
    _infer(server)
    wrong = _differing(sent, device.read(regions["taken"], BYTES))
    rate = _rate(server, secs)
    for name in regions:
        _post(server, f"/v2/cudasharedmemory/region/{name}/unregister", {})
    return [
        Row(
            name=f"bytes of {BYTES} that came out wrong",
            gateway=wrong,
            ok=wrong == 0,
            expected="0",
        ),
        Row(name="infer/s, 4 MiB in and out, 1 client", gateway=rate, better=Better.HIGHER),
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


def _infer(server: Server) -> None:
    given, taken = (
        {"shared_memory_region": name, "shared_memory_byte_size": BYTES}
        for name in ("given", "taken")
    )
    x = {"name": "x", "datatype": "FP32", "shape": [ELEMENTS], "parameters": given}
    body = {"inputs": [x], "outputs": [{"name": "x", "parameters": taken}]}
    _post(server, f"/v2/models/{MODEL}/infer", body)


def _rate(server: Server, secs: float) -> float:
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < secs:
        _infer(server)
        count += 1
    return count / (time.perf_counter() - began)


def _post(server: Server, path: str, body: Mapping[str, Any]) -> None:
    url = f"http://127.0.0.1:{server.ports.http}{path}"
    try:
        with urlopen(Request(url, orjson.dumps(body), method="POST"), timeout=30) as response:
            response.read()
    except HTTPError as error:
        raise LoadTestFailed(f"{path} answered {error.code}: {error.read().decode()}") from None
