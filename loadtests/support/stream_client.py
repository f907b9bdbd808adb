"""Clients of streams without an engine, by SSE and gRPC: one measurement, JSON on stdout.

python -m loadtests.support.stream_client KIND PORT PID STREAMS SECS [RESPONSES]

gRPC streams are read in HTTP/2 frames by asyncio, by grpc.aio, or by the official client.
"""

import argparse
import asyncio
import gc
import queue
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import grpc
import numpy as np
import orjson
import uvloop
from tritonclient import grpc as triton_client
from tritonclient.grpc import service_pb2 as pb

from loadtests.support.http_client import Address, Count, EventCounter, StreamFailed, connect, post
from loadtests.support.servers import spending

PATH = "/v2/models/repeat/generate_stream"
TIMEOUT_SECS = 60.0
FEWEST = 250
WARM_UP_SHARE = 0.1
OFFICIAL = "official"

Read = Callable[[int], Sequence[Count]]
"""Reads all streams concurrently, each with that many responses."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER = 9
PREFIX = 5
LARGEST_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 2**16 - 1
LARGEST_FRAME = 2**24 - 1

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 4, 5


@dataclass(frozen=True, slots=True)
class Measurement:
    """Requested and received responses, seconds until the last, and CPU seconds of the client.

    `server_secs` is the processor time of the server's processes.
    """

    asked: int
    responses: int
    secs: float
    cpu_secs: float
    server_secs: float = 0.0


async def sse(address: Address, responses: int, delay_us: int = 0) -> Count:
    """A stream of server-sent events."""
    asked = {"text_input": TEXT, "n": responses, "delay_us": delay_us}
    request = post(PATH, address, orjson.dumps(asked))
    transport, counter = await connect(address, lambda: EventCounter(request))
    try:
        return await counter.done
    finally:
        transport.close()


async def frames(address: Address, responses: int, delay_us: int = 0) -> Count:
    """A gRPC stream, counted in frames."""
    transport, connection = await connect(address, lambda: GrpcConnection(address))
    try:
        found = await connection.open(METHOD, repeat_request(responses, delay_us))
    finally:
        transport.close()
    return Count(found, time.perf_counter())


async def aio(address: Address, responses: int) -> Count:
    """A gRPC stream of grpc.aio."""
    found = await count_messages(address, repeat_request(responses))
    return Count(found, time.perf_counter())


STREAMS = {"sse": sse, "frames": frames, "aio": aio}
KINDS = (*STREAMS, OFFICIAL)


def reader(kind: str, address: Address, streams: int) -> Read:
    """A reader of concurrent streams of one kind."""
    if kind == OFFICIAL:
        client = OfficialClient(address, streams)
        return lambda responses: [client.count(responses)]
    return lambda responses: uvloop.run(_read_all(kind, address, streams, responses))


async def _read_all(kind: str, address: Address, streams: int, responses: int) -> Sequence[Count]:
    async with asyncio.timeout(TIMEOUT_SECS):
        return await asyncio.gather(*(STREAMS[kind](address, responses) for _ in range(streams)))


def measure(read: Read, pid: int, streams: int, secs: float) -> Measurement:
    """Read all streams for about `secs` seconds, after shorter reads to find their rate."""
    responses, took = FEWEST, 0.0
    while took < secs * WARM_UP_SHARE:
        responses *= 4
        took = read_once(read, streams, responses).secs
    gc.collect()
    gc.freeze()
    with spending(pid) as spent:
        found = read_once(read, streams, round(responses * secs / took))
    return replace(found, server_secs=spent.secs)


def measure_again_and_again(
    read: Read, pid: int, streams: int, secs: float, responses: int
) -> Measurement:
    """Send requests for `responses` responses one after the other for `secs` seconds."""
    read_once(read, streams, responses)
    gc.collect()
    gc.freeze()
    found: list[Measurement] = []
    with spending(pid) as spent:
        while sum(each.secs for each in found) < secs:
            found.append(read_once(read, streams, responses))
    return Measurement(
        asked=sum(each.asked for each in found),
        responses=sum(each.responses for each in found),
        secs=sum(each.secs for each in found),
        cpu_secs=sum(each.cpu_secs for each in found),
        server_secs=spent.secs,
    )


def read_once(read: Read, streams: int, responses: int) -> Measurement:
    """Read all streams once, each with `responses` responses."""
    cpu_began, began = time.process_time(), time.perf_counter()
    counts = read(responses)
    return Measurement(
        asked=streams * responses,
        responses=sum(count.responses for count in counts),
        secs=max(count.ended_at for count in counts) - began,
        cpu_secs=time.process_time() - cpu_began,
    )


def main() -> None:
    """Print the measurement that the arguments ask for."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.support.stream_client")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("port", type=int)
    parser.add_argument("pid", type=int, help="the server")
    parser.add_argument("streams", type=int)
    parser.add_argument("secs", type=float, help="length of the measurement")
    parser.add_argument("responses", type=int, nargs="?", help="default: as many as take SECS")
    asked = parser.parse_args()
    read = reader(asked.kind, Address(asked.port), asked.streams)
    if asked.responses is None:
        found = measure(read, asked.pid, asked.streams, asked.secs)
    else:
        limits = (asked.streams, asked.secs, asked.responses)
        found = measure_again_and_again(read, asked.pid, *limits)
    print(orjson.dumps(asdict(found)).decode(), flush=True)


@dataclass(slots=True)
class Counted:
    """One stream: its number of messages, and the part of a message that a frame cut in two."""

    done: asyncio.Future[int]
    messages: int = 0
    rest: bytes = b""


class GrpcConnection(asyncio.Protocol):
    """One HTTP/2 connection; `open` starts a stream whose future gets its number of messages."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._streams: dict[int, Counted] = {}
        self._next_id = 1
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        settings = _setting(INITIAL_WINDOW_SIZE, LARGEST_WINDOW)
        settings += _setting(MAX_FRAME_SIZE, LARGEST_FRAME)
        more = (LARGEST_WINDOW - DEFAULT_WINDOW).to_bytes(4, "big")
        self._transport.write(
            PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, more)
        )

    def open(self, method: str, message: bytes) -> asyncio.Future[int]:
        """Call a method with one message, and half-close."""
        number, self._next_id = self._next_id, self._next_id + 2
        counted = Counted(asyncio.get_running_loop().create_future())
        self._streams[number] = counted
        prefixed = b"\0" + len(message).to_bytes(4, "big") + message
        self._transport.write(
            _frame(HEADERS, END_HEADERS, number, _request_headers(method, self._address))
            + _frame(DATA, END_STREAM, number, prefixed)
        )
        return counted.done

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        at, total = 0, len(data)
        while total - at >= HEADER:
            end = at + HEADER + int.from_bytes(data[at : at + 3], "big")
            if end > total:
                break
            self._take(data[at:end])
            at = end
        self._rest = data[at:]

    def connection_lost(self, exc: Exception | None) -> None:
        for counted in self._streams.values():
            if not counted.done.done():
                counted.done.set_exception(
                    StreamFailed(f"the connection was closed after {counted.messages} messages")
                )

    def _take(self, frame: bytes) -> None:
        kind, flags = frame[3], frame[4]
        if kind in (DATA, HEADERS):
            counted = self._streams[int.from_bytes(frame[5:HEADER], "big")]
            if kind == DATA:
                _count(counted, frame)
            if flags & END_STREAM and not counted.done.done():
                counted.done.set_result(counted.messages)
        elif kind in (SETTINGS, PING) and not flags & ACK:
            payload = frame[HEADER:] if kind == PING else b""
            self._transport.write(_frame(kind, ACK, 0, payload))
        elif kind in (RST_STREAM, GOAWAY):
            self._transport.close()


def _count(counted: Counted, frame: bytes) -> None:
    """Count the messages that end in this frame (gRPC over HTTP2: Length-Prefixed-Message)."""
    at = HEADER
    if counted.rest:
        frame, at = counted.rest + frame[HEADER:], 0
    total = len(frame)
    while total - at >= PREFIX:
        end = at + PREFIX + int.from_bytes(frame[at + 1 : at + PREFIX], "big")
        if end > total:
            break
        counted.messages += 1
        at = end
    counted.rest = frame[at:]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )


def _setting(name: int, value: int) -> bytes:
    return name.to_bytes(2, "big") + value.to_bytes(4, "big")


def _request_headers(method: str, address: Address) -> bytes:
    """The header block in HPACK's plainest form (RFC 7541, 6.1 and 6.2.2)."""
    literals: Sequence[tuple[bytes, str]] = (
        (b"\x04", method),  # :path is entry 4 of the static table
        (b"\x01", str(address)),  # :authority is entry 1
        (b"\x00" + _string("te"), "trailers"),
        (b"\x00" + _string("content-type"), "application/grpc"),
    )
    # POST and http are whole entries.
    return b"\x83\x86" + b"".join(name + _string(value) for name, value in literals)


def _string(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) >= 127:
        raise ValueError(f"'{text}' has {len(encoded)} bytes, expected at most 126")
    return bytes((len(encoded),)) + encoded


METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
MODEL = "repeat"
TEXT = "token "

# Each channel has a connection of its own, as clients in processes of their own have.
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


def repeat_request(count: int, delay_us: int = 0) -> bytes:
    """A serialized request for `count` responses."""
    request = pb.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(struct.pack("<I", len(TEXT)) + TEXT.encode())
    for name, value in (("n", count), ("delay_us", delay_us)):
        request.inputs.add(name=name, datatype="INT32", shape=[1])
        request.raw_input_contents.append(struct.pack("<i", value))
    return bytes(request.SerializeToString())


async def count_messages(address: Address, request: bytes) -> int:
    """The number of messages of one stream of grpc.aio, which are not parsed."""
    async with grpc.aio.insecure_channel(str(address), options=OWN_CONNECTION) as channel:
        open_stream: Any = channel.stream_stream(METHOD)
        call = open_stream(iter([request]))
        found = 0
        while await call.read() is not grpc.aio.EOF:
            found += 1
    return found


class OfficialClient:
    """Streams of the official client, one client per stream, with callbacks."""

    def __init__(self, address: Address, streams: int) -> None:
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._clients = [
            triton_client.InferenceServerClient(str(address), channel_args=OWN_CONNECTION)
            for _ in range(streams)
        ]
        for client in self._clients:
            client.start_stream(partial(_put, self._answers))

    def count(self, responses: int) -> Count:
        """Request `responses` responses of each stream, and wait for all of them."""
        for client in self._clients:
            client.async_stream_infer(MODEL, _inputs(responses))
        for _ in range(responses * len(self._clients)):
            if (error := self._answers.get(timeout=60)) is not None:
                raise StreamFailed(str(error))
        return Count(responses * len(self._clients), time.perf_counter())


def _put(answers: "queue.SimpleQueue[Any]", result: Any, error: Any) -> None:
    answers.put(error)


def _inputs(responses: int) -> Sequence[Any]:
    text = triton_client.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([TEXT.encode()], dtype=np.object_))
    count = triton_client.InferInput("n", [1], "INT32")
    count.set_data_from_numpy(np.array([responses], dtype=np.int32))
    return [text, count]


if __name__ == "__main__":
    main()
