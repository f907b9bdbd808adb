"""What clients of gRPC do to a server for an hour: each kind of them, well-behaved or not."""

import asyncio
import random
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from loadtests.grpc_clients import METHOD, OWN_CONNECTION, repeat_request
from loadtests.sse import Address

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
    """A client met what it should not meet; the text says what."""


def write_models(repository: Path) -> None:
    """The models that are asked."""
    for name, config in MODELS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)


class Load:
    """Clients of every kind, until they are cancelled; counts what they did, by kind."""

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
        raise Surprise(f"{len(answer)} bytes came back of {size}")


async def _stream(channel: Any, _: Address) -> None:
    call, found = channel.stream_stream(METHOD)(iter([repeat_request(MANY)])), 0
    while await call.read() is not grpc.aio.EOF:
        found += 1
    if found != MANY:
        raise Surprise(f"{found} responses came, expected {MANY}")


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
        raise Surprise("an answer came after its deadline")


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
    """One of the abuses, after which the server ends the connection, or the client does."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(random.choice(ABUSES)())
        writer.write_eof()
        while await reader.read(2**16):
            """The server says what it has to say, and closes the connection."""
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
