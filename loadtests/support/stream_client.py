"""One measurement of streams without an engine, in a process of its own: JSON on stdout.

python -m loadtests.support.stream_client KIND PORT STREAMS SECS [RESPONSES]
"""

import argparse
import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import orjson
import uvloop

from loadtests.support.grpc_clients import (
    METHOD,
    TEXT,
    GrpcConnection,
    OfficialClient,
    count_messages,
    repeat_request,
)
from loadtests.support.http_client import Address, Count, EventCounter, connect, post

PATH = "/v2/models/repeat/generate_stream"
TIMEOUT_SECS = 60.0
FEWEST = 250
WARM_UP_SHARE = 0.1
OFFICIAL = "official"

Read = Callable[[int], Sequence[Count]]
"""Reads all streams concurrently, each with that many responses."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Responses asked for and come, seconds until the last, and CPU seconds of the client."""

    asked: int
    responses: int
    secs: float
    cpu_secs: float


async def sse(address: Address, responses: int) -> Count:
    """A stream of server-sent events."""
    request = post(PATH, address, orjson.dumps({"text_input": TEXT, "n": responses}))
    transport, counter = await connect(address, lambda: EventCounter(request))
    try:
        return await counter.done
    finally:
        transport.close()


async def frames(address: Address, responses: int) -> Count:
    """A gRPC stream, counted in frames."""
    transport, connection = await connect(address, lambda: GrpcConnection(address))
    try:
        found = await connection.open(METHOD, repeat_request(responses))
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
    """How streams of this kind are read."""
    if kind == OFFICIAL:
        client = OfficialClient(address, streams)
        return lambda responses: [client.count(responses)]
    return lambda responses: uvloop.run(_read_all(kind, address, streams, responses))


async def _read_all(kind: str, address: Address, streams: int, responses: int) -> Sequence[Count]:
    async with asyncio.timeout(TIMEOUT_SECS):
        return await asyncio.gather(*(STREAMS[kind](address, responses) for _ in range(streams)))


def measure(read: Read, streams: int, secs: float) -> Measurement:
    """Read all streams for about `secs` seconds, after shorter reads that find out how much."""
    responses, took = FEWEST, 0.0
    while took < secs * WARM_UP_SHARE:
        responses *= 4
        took = read_once(read, streams, responses).secs
    gc.collect()
    gc.freeze()
    return read_once(read, streams, round(responses * secs / took))


def measure_again_and_again(read: Read, streams: int, secs: float, responses: int) -> Measurement:
    """Requests of exactly that many responses, one after the other for `secs` seconds."""
    read_once(read, streams, responses)
    gc.collect()
    gc.freeze()
    found: list[Measurement] = []
    while sum(each.secs for each in found) < secs:
        found.append(read_once(read, streams, responses))
    return Measurement(
        asked=sum(each.asked for each in found),
        responses=sum(each.responses for each in found),
        secs=sum(each.secs for each in found),
        cpu_secs=sum(each.cpu_secs for each in found),
    )


def read_once(read: Read, streams: int, responses: int) -> Measurement:
    """Read all streams once, each with that many responses."""
    cpu_began, began = time.process_time(), time.perf_counter()
    counts = read(responses)
    return Measurement(
        asked=streams * responses,
        responses=sum(count.responses for count in counts),
        secs=max(count.ended_at for count in counts) - began,
        cpu_secs=time.process_time() - cpu_began,
    )


def main() -> None:
    """Measure what the arguments ask for, and print it."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.support.stream_client")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("port", type=int)
    parser.add_argument("streams", type=int)
    parser.add_argument("secs", type=float, help="about so long")
    parser.add_argument("responses", type=int, nargs="?", help="of each request (default: so many)")
    asked = parser.parse_args()
    read = reader(asked.kind, Address(asked.port), asked.streams)
    if asked.responses is None:
        found = measure(read, asked.streams, asked.secs)
    else:
        found = measure_again_and_again(read, asked.streams, asked.secs, asked.responses)
    print(orjson.dumps(asdict(found)).decode(), flush=True)


if __name__ == "__main__":
    main()
