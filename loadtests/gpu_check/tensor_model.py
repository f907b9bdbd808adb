"""A small network in the gateway and alone: its outputs and its rate."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop

from gateway.errors import InferenceError
from gateway.in_process.server import Server
from loadtests.gpu_check.outcome import Row
from loadtests.gpu_check.parts import Asked
from loadtests.support.rounds import Better, LoadTestFailed

Array = npt.NDArray[np.float32]
Network = Callable[[Array], Array]

SIZE = 256
CLIENTS = 32
LARGEST_ERROR = 1e-3
"""Against the largest output; a GPU adds in another order, and not more exactly."""
CONFIG = """
backend: "{backend}"
max_batch_size: {clients}
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {size} ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ {size} ] }} ]
instance_group [ {{ kind: {kind} count: 1 }} ]
dynamic_batching {{ }}
"""


def inputs(rows: int) -> Array:
    """The same ones each time."""
    return np.random.default_rng(7).standard_normal((rows, SIZE), dtype=np.float32)


def weights() -> tuple[Array, Array]:
    """Of two layers with a ReLU between them."""
    random = np.random.default_rng(3)
    first, second = random.standard_normal((2, SIZE, SIZE), dtype=np.float32) / np.float32(
        SIZE**0.5
    )
    return first, second


def compare(
    backend: str, write: Callable[[Path], Any], on_cpu: Network, alone: Network, asked: Asked
) -> Sequence[Row]:
    """Serve the network that `write` puts into a version's folder, inside this process.

    `on_cpu` is the network that must be right, `alone` the one that runs as the gateway's does.
    """
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "network" / "1"
        version.mkdir(parents=True)
        write(version)
        config = CONFIG.format(backend=backend, clients=CLIENTS, size=SIZE, kind=asked.kind)
        (version.parent / "config.pbtxt").write_text(config)
        try:
            return uvloop.run(_compare(Path(folder), on_cpu, alone, asked))
        except InferenceError as error:
            raise LoadTestFailed(f"backend {backend}: {error}") from None


async def _compare(
    repository: Path, on_cpu: Network, alone: Network, asked: Asked
) -> Sequence[Row]:
    async with Server(model_repository=str(repository)) as server:
        model = server.model("network")

        async def served(x: Array) -> Array:
            response = await model.async_infer(inputs={"x": x}).only()
            found: Array = response.outputs["y"]
            return found

        x = inputs(CLIENTS)
        error = _error(await served(x), on_cpu(x))
        rate = _rate_alone(alone, asked.secs)
        one, many = [await _rate(served, clients, asked.secs) for clients in (1, CLIENTS)]
    return [
        Row(
            name="largest error against the CPU",
            gateway=error,
            ok=error <= LARGEST_ERROR,
            expected=f"at most {LARGEST_ERROR:g}",
        ),
        Row(name="infer/s, 1 client", gateway=one, alone=rate, better=Better.HIGHER),
        Row(name=f"infer/s, {CLIENTS} clients, batched", gateway=many, better=Better.HIGHER),
    ]


def _error(found: Array, right: Array) -> float:
    return float(np.abs(found - right).max() / np.abs(right).max())


def _rate_alone(network: Network, secs: float) -> float:
    x, count = inputs(1), 0
    network(x)
    began = time.perf_counter()
    while time.perf_counter() - began < secs:
        network(x)
        count += 1
    return count / (time.perf_counter() - began)


async def _rate(served: Callable[[Array], Any], clients: int, secs: float) -> float:
    x = inputs(1)
    await served(x)
    began = time.perf_counter()

    async def client() -> int:
        count = 0
        while time.perf_counter() - began < secs:
            await served(x)
            count += 1
        return count

    counts = await asyncio.gather(*(client() for _ in range(clients)))
    return sum(counts) / (time.perf_counter() - began)
