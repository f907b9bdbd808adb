"""Memory of the server in an hour of mixed gRPC load, with good and bad clients."""

import argparse
import asyncio
import csv
import random
import statistics
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import uvloop
from rich.console import Console
from tritonclient.grpc import service_pb2 as pb

from loadtests.support import rounds, servers
from loadtests.support.curves import Panel, draw
from loadtests.support.http_client import Address
from loadtests.support.results import FOLDER
from loadtests.support.servers import (
    LoadTestFailed,
    Server,
    in_flight,
    open_files,
    pinned,
    resident_bytes,
    serving,
)
from loadtests.support.stream_client import METHOD, OWN_CONNECTION, repeat_request

INFER = "/inference.GRPCInferenceService/ModelInfer"
ECHO = """backend: "identity"
input {{ name: "INPUT" data_type: TYPE_FP32 dims: [-1] }}
output {{ name: "OUTPUT" data_type: TYPE_FP32 dims: [-1] }}
parameters {{ key: "delay_us" value {{ string_value: "{delay_us}" }} }}
parameters {{ key: "concurrency" value {{ string_value: "0" }} }}
"""
SLOW_US = 50_000
MODELS = {
    "echo": ECHO.format(delay_us=0),
    "slow": ECHO.format(delay_us=SLOW_US),
    "repeat": 'backend: "repeat"\n',
}
SMALL_BYTES, LARGE_BYTES = 64, 2**20
MANY = 1000
READS = 20
READ_SECS = 0.05
DEADLINE_SECS = 0.01
PAUSE_SECS = 0.02
WAIT_SECS = 30.0
UNLIMITED = (
    *OWN_CONNECTION,
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, RESET, PING, CONTINUATION = 4, 3, 6, 9


class Surprise(Exception):
    """A response that a correct server does not send; the text has it."""


def write_models(repository: Path) -> None:
    """Write the models of the load."""
    for name, config in MODELS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)


class Load:
    """Clients of every kind, until they are cancelled; `done` counts their actions by kind."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.done: Counter[str] = Counter()
        self.surprises: list[str] = []

    async def run(self) -> None:
        """Keep a client of each kind busy."""
        async with asyncio.TaskGroup() as clients:
            for kind, act in KINDS.items():
                clients.create_task(self._repeat(kind, act))

    async def _repeat(self, kind: str, act: "Act") -> None:
        async with grpc.aio.insecure_channel(str(self._address), options=UNLIMITED) as channel:
            while True:
                try:
                    async with asyncio.timeout(WAIT_SECS):
                        await act(channel, self._address)
                except (grpc.RpcError, Surprise, TimeoutError, OSError) as error:
                    self.surprises.append(f"{kind}: {error!r}"[:300])
                self.done[kind] += 1
                await asyncio.sleep(PAUSE_SECS)


Act = Callable[[Any, Address], Awaitable[None]]


def _request(model: str, size: int) -> bytes:
    message = pb.ModelInferRequest(model_name=model, raw_input_contents=[bytes(size)])
    message.inputs.add(name="INPUT", datatype="FP32", shape=[size // 4])
    return bytes(message.SerializeToString())


def _infer(channel: Any, model: str, size: int, timeout: float | None = None) -> Any:
    return channel.unary_unary(INFER)(_request(model, size), timeout=timeout)


async def _unary(size: int, channel: Any, _: Address) -> None:
    answer = await _infer(channel, "echo", size)
    if len(answer) < size:
        raise Surprise(f"{len(answer)} bytes answered {size}")


async def _stream(channel: Any, _: Address) -> None:
    call, found = channel.stream_stream(METHOD)(iter([repeat_request(MANY)])), 0
    while await call.read() is not grpc.aio.EOF:
        found += 1
    if found != MANY:
        raise Surprise(f"found {found} responses, expected {MANY}")


async def _leave(channel: Any, _: Address) -> None:
    """Cancel an RPC under way, one that has just begun, and a stream after its first answer."""
    begun, unary = (_infer(channel, "slow", SMALL_BYTES) for _ in range(2))
    stream = channel.stream_stream(METHOD)(iter([repeat_request(MANY, SLOW_US)]))
    unary.cancel()
    await stream.read()
    for call in (begun, stream):
        call.cancel()


async def _miss(channel: Any, _: Address) -> None:
    try:
        await _infer(channel, "slow", SMALL_BYTES, DEADLINE_SECS)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
    else:
        raise Surprise("an RPC ended with an answer after its deadline")


async def _read_slowly(channel: Any, _: Address) -> None:
    call = channel.stream_stream(METHOD)(iter([repeat_request(MANY * MANY)]))
    for _number in range(READS):
        if await call.read() is grpc.aio.EOF:
            raise Surprise("a stream ended early")
        await asyncio.sleep(READ_SECS)
    call.cancel()


async def _reconnect(_: Any, address: Address) -> None:
    async with grpc.aio.insecure_channel(str(address), options=UNLIMITED) as channel:
        await _infer(channel, "echo", SMALL_BYTES)


async def _misbehave(_: Any, address: Address) -> None:
    """Send one of the abuses, and read until the server closes the connection."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(random.choice(ABUSES)())
        writer.write_eof()
        while await reader.read(2**16):
            """Frames before the connection is closed."""
    except ConnectionResetError:
        return
    finally:
        writer.close()


def _frame(kind: int, payload: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    return (
        struct.pack(">L", len(payload))[1:]
        + bytes((kind, flags))
        + struct.pack(">L", stream)
        + payload
    )


BEGIN = PREFACE + _frame(SETTINGS)
ABUSES: tuple[Callable[[], bytes], ...] = (
    lambda: random.randbytes(1000),
    lambda: PREFACE + random.randbytes(1000),
    lambda: BEGIN + random.randbytes(1000),
    lambda: PREFACE[:10],
    lambda: BEGIN + _frame(0, bytes(2**16), 1),
    lambda: BEGIN + _frame(PING, b"12345678") * 1000,
    lambda: BEGIN + _frame(SETTINGS) * 1000,
    lambda: BEGIN + _frame(1, b"", 1) + _frame(CONTINUATION, b"", 1) * 1000,
    lambda: BEGIN + b"".join(_frame(RESET, bytes(4), number) for number in range(1, 200, 2)),
    lambda: b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n",
)
KINDS: Mapping[str, Act] = {
    "small": partial(_unary, SMALL_BYTES),
    "large": partial(_unary, LARGE_BYTES),
    "stream": _stream,
    "cancel": _leave,
    "deadline": _miss,
    "slow reader": _read_slowly,
    "reconnect": _reconnect,
    "bad frames": _misbehave,
}


MIB = 2**20
GROWTH_LIMIT = 24 * MIB
"""The most growth from the middle third to the last one; allocators vary by 10 MiB."""

FILES_LIMIT = 20
SHOWN = 5
END_SECS = 30.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment; `done` has the actions since the sample before, by kind."""

    secs: float
    resident_bytes: int
    open_files: int
    per_sec: float
    done: Mapping[str, int]


def grpc_soak(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Load, sample and draw; LoadTestFailed if memory grows or a good client has an error."""
    for name, default, text in (
        ("--secs", 3600, "length"),
        ("--every", 5, "seconds between samples"),
    ):
        parser.add_argument(
            name, type=rounds.positive, default=default, help=f"{text} (default: %(default)s)"
        )
    parser.add_argument("--transport", choices=("hyper", "grpcio"), default="hyper")
    parser.add_argument(
        "--to", type=Path, default=FOLDER / "grpc_soak", help="path of both files without a suffix"
    )
    servers.add_cpu_flags(parser)
    asked, console = parser.parse_args(arguments), Console()
    with rounds.failures_as_lines("grpc_soak"), pinned(asked.client_cpus):
        samples, surprises = _soak(asked)
        _write(asked, samples)
        console.print(f"{asked.to.with_suffix('.csv')} and {asked.to.with_suffix('.svg')}")
        for line in surprises[:SHOWN]:
            console.print(line, markup=False)
        _check(samples, surprises)


def _soak(asked: argparse.Namespace) -> tuple[Sequence[Sample], Sequence[str]]:
    with TemporaryDirectory() as folder:
        write_models(Path(folder))
        flag = f"--grpc-transport={asked.transport}"
        launch = servers.gateway(Path(folder), servers.GATEWAY, flag).launch()
        with serving(launch, asked.server_cpus) as server:
            return uvloop.run(_load_and_sample(server, asked.secs, asked.every))


async def _load_and_sample(
    server: Server, secs: float, every: float
) -> tuple[Sequence[Sample], Sequence[str]]:
    load, samples = Load(Address(server.ports.grpc)), []
    clients = asyncio.create_task(load.run())
    began, before = time.monotonic(), Counter[str]()
    while (now := time.monotonic() - began) < secs and not clients.done():
        await asyncio.sleep(every)
        samples.append(_sample(server, time.monotonic() - began, now, load.done - before))
        before = Counter(load.done)
    clients.cancel()
    with suppress(asyncio.CancelledError):
        await clients
    await _require_idle(server)
    return samples, load.surprises


def _sample(server: Server, now: float, before: float, done: Mapping[str, int]) -> Sample:
    return Sample(
        secs=now,
        resident_bytes=resident_bytes(server.pid),
        open_files=open_files(server.pid),
        per_sec=sum(done.values()) / (now - before),
        done={kind: done.get(kind, 0) for kind in KINDS},
    )


async def _require_idle(server: Server) -> None:
    """Wait until no request is in flight."""
    deadline = time.monotonic() + END_SECS
    while found := await asyncio.to_thread(in_flight, server):
        if time.monotonic() > deadline:
            raise LoadTestFailed(f"{found:g} requests are in flight without clients, expected 0")
        await asyncio.sleep(0.1)


def _write(asked: argparse.Namespace, samples: Sequence[Sample]) -> None:
    asked.to.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(each), **each.done} for each in samples]
    with asked.to.with_suffix(".csv").open("w", newline="") as file:
        columns = ["secs", "resident_bytes", "open_files", "per_sec", *KINDS]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    draw(
        asked.to.with_suffix(".svg"),
        f"gRPC soak, {asked.transport}, {asked.secs / 60:g} minutes",
        [each.secs for each in samples],
        [
            Panel("resident memory, MiB", [each.resident_bytes / MIB for each in samples]),
            Panel("open files", [each.open_files for each in samples]),
            Panel("actions of clients per second", [each.per_sec for each in samples]),
        ],
    )


def _check(samples: Sequence[Sample], surprises: Sequence[str]) -> None:
    if surprises:
        raise LoadTestFailed(f"{len(surprises)} errors of good clients, expected none")
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[2 * third :]
    if not middle:
        raise LoadTestFailed(f"found {len(samples)} samples, expected at least three")
    growth = _memory(last) - _memory(middle)
    if growth > GROWTH_LIMIT:
        raise LoadTestFailed(f"memory grew by {growth / MIB:.1f} MiB from the middle to the end")
    files = max(each.open_files for each in last) - max(each.open_files for each in middle)
    if files > FILES_LIMIT:
        raise LoadTestFailed(f"{files} files more are open at the end than in the middle")


def _memory(samples: Sequence[Sample]) -> float:
    return statistics.median(each.resident_bytes for each in samples)
