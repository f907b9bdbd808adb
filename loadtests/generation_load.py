"""So many streams of one LLM side by side, each asking again as soon as it is answered."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import uvloop

from loadtests.sse import Address, EventTimer, Timing, connect

TIMEOUT_SECS = 600.0

Encode = Callable[[Address, str, int], bytes]
"""The bytes of a request to a server, from a prompt and a number of tokens."""


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` side by side, each with `requests` requests for `max_tokens` tokens."""

    streams: int
    requests: int
    max_tokens: int

    @property
    def tokens(self) -> int:
        """How many tokens that makes."""
        return self.streams * self.requests * self.max_tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """The timings of all requests, and how much of a core the client used."""

    timings: Sequence[Timing]
    client_cores: float

    @property
    def secs(self) -> float:
        """Seconds from the first request to the last event."""
        began = min(timing.sent for timing in self.timings)
        return max(timing.arrivals[-1] for timing in self.timings) - began


def put(load: Load, address: Address, encode: Encode, prompts: Iterator[str]) -> Outcome:
    """Put a load on a server, and wait until all of it is answered."""
    cpu_began, began = time.process_time(), time.perf_counter()
    timings = uvloop.run(_put(load, address, encode, prompts))
    used = time.process_time() - cpu_began
    return Outcome(timings, used / (time.perf_counter() - began))


async def _put(
    load: Load, address: Address, encode: Encode, prompts: Iterator[str]
) -> Sequence[Timing]:
    streams = [
        [encode(address, next(prompts), load.max_tokens) for _ in range(load.requests)]
        for _ in range(load.streams)
    ]
    async with asyncio.timeout(TIMEOUT_SECS):
        answered = await asyncio.gather(*(_ask(address, requests) for requests in streams))
    return [timing for timings in answered for timing in timings]


async def _ask(address: Address, requests: Sequence[bytes]) -> Sequence[Timing]:
    return [await ask_once(address, request) for request in requests]


async def ask_once(address: Address, request: bytes) -> Timing:
    """One request on a connection of its own; StreamFailed unless it ends well."""
    transport, timer = await connect(address, lambda: EventTimer(request))
    try:
        return await timer.done
    finally:
        transport.close()
