"""Large tensors from a router to a replica, and the same bytes on a socket."""

import asyncio
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import uvloop

from gateway.fleet.choice import ANY_REQUEST
from gateway.fleet.connection import ReplicaConnection
from gateway.fleet.handshake import FleetRole, Identity
from gateway.fleet.prefixes import KeyIndex
from gateway.fleet.prompts import PrefixIndexes
from gateway.messages import InferRequest
from gateway.tensor import Datatype, array_tensor, text_tensor
from loadtests.support.results import Better, Line, Metric, Results
from loadtests.support.servers import Cpus, LoadTestFailed, pinned, replica, serving

SIZE = 64 << 20
COUNT = 8
"""Tensors of a round."""
WARM_UP = 2
CONNECT_SECS = 20.0
SOCKET, FLEET = "socket", "fleet"
SPEED = Metric(Line("64 MiB tensors", "tensor", 1, "sender"), "speed", "GB/s", Better.HIGHER)

CONFIG = """
backend: "identity"
input [
  { name: "NAME" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "DATA" data_type: TYPE_UINT8 dims: [ -1 ] }
]
output [ { name: "NAME" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
"""A model that answers a large tensor with a small one."""

RECEIVER = f"""
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sender = listener.accept()[0]
memory = memoryview(bytearray({SIZE}))
filled = 0
while size := sender.recv_into(memory[filled:]):
    filled += size
    if filled == len(memory):
        filled = 0
        sender.sendall(b"a")
"""

Send = Callable[[], object]
"""Sends one tensor, and waits until the other process has it."""


def compare(rounds: int, cpus: Cpus, folder: Path) -> Results:
    """The bytes a second of both, in rounds that alternate."""
    results = Results()
    with _by_socket(cpus) as by_socket, _by_fleet(cpus, folder) as by_fleet:
        ways = ((SOCKET, by_socket), (FLEET, by_fleet))
        for _, send in ways:
            _gigabytes_per_sec(send, WARM_UP)
        for number in range(rounds):
            for name, send in ways[:: -1 if number % 2 else 1]:
                results.add(name, {SPEED: _gigabytes_per_sec(send, COUNT)})
    return results


def describe(results: Results) -> str:
    """The medians and their ratio, in words."""
    found = [f"{name} {results.median(SPEED, name):.2f} GB/s" for name in (SOCKET, FLEET)]
    ratio = results.ratio(SPEED, FLEET, SOCKET)
    return f"{SPEED.line}: {', '.join(found)}, ratio {ratio or 0:.2f}"


def _gigabytes_per_sec(send: Send, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        send()
    return count * SIZE / (time.perf_counter() - began) / 1e9


@contextmanager
def _by_socket(cpus: Cpus) -> Iterator[Send]:
    data = bytes(SIZE)
    command = [sys.executable, "-c", RECEIVER]
    with pinned(cpus):
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
    with process as receiver:
        assert receiver.stdout is not None  # noqa: S101 - it is a pipe
        port = int(receiver.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as connection:

            def send() -> None:
                connection.sendall(data)
                connection.recv(1)

            yield send


class Responses:
    """A connection to a replica, as a router has it, whose responses are counted.

    It is made again for a measurement if it was lost while the event loop was at rest.
    """

    def __init__(
        self, runner: asyncio.Runner, replica: ReplicaConnection, port: int, model: str
    ) -> None:
        self._runner = runner
        self._replica = replica
        self._model = model
        self.port = port

    async def connect(self) -> None:
        """Wait until the replica takes requests of the model."""
        async with asyncio.timeout(CONNECT_SECS):
            while not self._replica.serves((self._model, 1)):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)

    def per_sec(self, requests: Sequence[InferRequest]) -> float:
        """Responses a second of some requests at the same time."""
        self._runner.run(self.connect())
        began = time.perf_counter()
        found = self._runner.run(self._all(requests))
        return found / (time.perf_counter() - began)

    def median_us(self, request: InferRequest, count: int) -> float:
        """The median time of a request, of as many one after the other."""
        return self._runner.run(self._median_us(request, count))

    async def _median_us(self, request: InferRequest, count: int) -> float:
        await self.connect()
        took_us = []
        for _ in range(count):
            began = time.perf_counter()
            await self._count(request)
            took_us.append((time.perf_counter() - began) * 1e6)
        return statistics.median(took_us)

    async def _all(self, requests: Sequence[InferRequest]) -> int:
        return sum(await asyncio.gather(*map(self._count, requests)))

    async def _count(self, request: InferRequest) -> int:
        news, found = asyncio.Event(), 0
        call = self._replica.call((request.model, 1), request, news.set, ANY_REQUEST)
        while True:
            if call.take() is not None:
                found += 1
            elif call.is_over:
                break
            else:
                news.clear()
                await news.wait()
        call.leave()
        if not found:
            raise LoadTestFailed("the replica has not answered")
        return found


@contextmanager
def connected(models: Path, cpus: Cpus, model: str) -> Iterator[Responses]:
    """A replica of every model of a folder, and a connection to it that serves one."""
    launch = replica(models, f"replica of {model}")
    with serving(launch, cpus), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        identity = Identity("sluice", FleetRole.ROUTER)
        indexes = PrefixIndexes(KeyIndex)
        port = launch.ports.grpc
        connection = ReplicaConnection("127.0.0.1", port, identity, lambda: None, indexes)
        found = Responses(runner, connection, port, model)

        async def begin() -> asyncio.Task[None]:
            task = asyncio.create_task(connection.run())
            await found.connect()
            return task

        async def end() -> None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        task = runner.run(begin())
        yield found
        runner.run(end())


@contextmanager
def _by_fleet(cpus: Cpus, folder: Path) -> Iterator[Send]:
    (folder / "taken" / "1").mkdir(parents=True)
    (folder / "taken" / "config.pbtxt").write_text(CONFIG)
    data = array_tensor("DATA", Datatype.UINT8, np.zeros(SIZE, np.uint8))
    request = InferRequest(model="taken", version="1", inputs=(text_tensor("NAME", ["a"]), data))
    with connected(folder, cpus, "taken") as responses:
        yield lambda: responses.per_sec([request])
