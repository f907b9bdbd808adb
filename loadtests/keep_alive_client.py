"""Clients that ask over a connection each, one request after the other."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import uvloop

from loadtests.rounds import LoadTestFailed
from loadtests.sse import Address

TIMEOUT_SECS = 300.0
OK = b"HTTP/1.1 200 "
LENGTH = b"content-length:"


@dataclass(frozen=True, slots=True)
class Answers:
    """How many requests were answered per second, how long each took, and what a core had to do."""

    per_sec: float
    took: Sequence[float]
    client_cores: float


def ask(address: Address, requests: Sequence[bytes], clients: int, secs: float) -> Answers:
    """Ask again and again for so long; all that was asked is waited for."""
    cpu_began, began = time.process_time(), time.perf_counter()
    took = uvloop.run(_ask_all(address, requests, clients, secs))
    spent = time.perf_counter() - began
    return Answers(len(took) / spent, took, (time.process_time() - cpu_began) / spent)


async def ask_once(address: Address, request: bytes) -> bytes:
    """The body of one answer."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        return await _exchange(reader, writer, request)
    finally:
        writer.close()


async def _ask_all(
    address: Address, requests: Sequence[bytes], clients: int, secs: float
) -> list[float]:
    until, queue = time.perf_counter() + secs, cycle(requests)

    async def client() -> list[float]:
        took = []
        reader, writer = await asyncio.open_connection(address.host, address.port)
        while (began := time.perf_counter()) < until:
            await _exchange(reader, writer, next(queue))
            took.append(time.perf_counter() - began)
        writer.close()
        return took

    async with asyncio.timeout(TIMEOUT_SECS):
        found = await asyncio.gather(*(client() for _ in range(clients)))
    return [each for took in found for each in took]


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> bytes:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readexactly(_length(head))
    if not head.startswith(OK):
        raise LoadTestFailed(f"the server answered: {(head + body).decode(errors='replace')}")
    return body


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(LENGTH):
            return int(line[len(LENGTH) :])
    raise LoadTestFailed(f"an answer has no length: {head.decode(errors='replace')}")
