"""One measurement of streams without an engine, in a process of its own: JSON on stdout.

    python -m loadtests.stream_client KIND PORT STREAMS RESPONSES
"""

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable

import uvloop

from loadtests.grpc_clients import METHOD, OfficialClient, count_messages, repeat_request
from loadtests.grpc_frames import GrpcConnection
from loadtests.sse import Address, EventCounter, StreamFailed, connect, post

PATH = "/v2/models/repeat/generate_stream"
TEXT = "token "
TIMEOUT_SECS = 120.0
WARM_UP_SHARE = 10

Stream = Callable[[Address, int], Awaitable[float]]
"""Reads one stream of so many responses; returns when its last one came."""


async def sse(address: Address, responses: int) -> float:
    """A stream of server-sent events."""
    body = json.dumps({"text_input": TEXT, "n": responses}).encode()
    request = post(PATH, address, body)
    transport, counter = await connect(address, lambda: EventCounter(request, responses))
    try:
        return await counter.done
    finally:
        transport.close()


async def frames(address: Address, responses: int) -> float:
    """A gRPC stream, counted in frames."""
    transport, connection = await connect(address, lambda: GrpcConnection(address))
    try:
        return _all_came(await connection.open(METHOD, repeat_request(responses)), responses)
    finally:
        transport.close()


async def aio(address: Address, responses: int) -> float:
    """A gRPC stream of grpc.aio."""
    return _all_came(await count_messages(address, repeat_request(responses)), responses)


def _all_came(found: int, expected: int) -> float:
    if found != expected:
        raise StreamFailed(f"{found} responses came, expected {expected}")
    return time.perf_counter()


STREAMS: dict[str, Stream] = {"sse": sse, "frames": frames, "aio": aio}
OFFICIAL = "official"


async def _measure(stream: Stream, address: Address, streams: int, responses: int) -> float:
    """Read all streams side by side; seconds from the first request to the last response."""
    began = time.perf_counter()
    async with asyncio.timeout(TIMEOUT_SECS), asyncio.TaskGroup() as group:
        tasks = [group.create_task(_once(stream, address, responses)) for _ in range(streams)]
    return max(task.result() for task in tasks) - began


async def _once(stream: Stream, address: Address, responses: int) -> float:
    return await stream(address, responses)


def _measure_official(client: OfficialClient, responses: int) -> float:
    began = time.perf_counter()
    return client.count(responses) - began


def main() -> None:
    """Warm up, measure once, and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[*STREAMS, OFFICIAL])
    parser.add_argument("port", type=int)
    parser.add_argument("streams", type=int)
    parser.add_argument("responses", type=int, help="responses of each stream")
    asked = parser.parse_args()
    address = Address(asked.port)
    measure: Callable[[int], float]
    if asked.kind == OFFICIAL:
        client = OfficialClient(address, asked.streams)
        measure = lambda n: _measure_official(client, n)
    else:
        stream = STREAMS[asked.kind]
        measure = lambda n: uvloop.run(_measure(stream, address, asked.streams, n))
    measure(max(1, asked.responses // WARM_UP_SHARE))
    gc.collect()
    gc.freeze()
    cpu = time.process_time()
    secs = measure(asked.responses)
    cpu_secs = time.process_time() - cpu
    print(json.dumps({"secs": secs, "cpu_secs": cpu_secs}), flush=True)


if __name__ == "__main__":
    main()
