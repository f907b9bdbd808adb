"""Loads of a given time: requests at fixed times (open loop), and clients one after the other."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import uvloop

from loadtests.support.http_client import Address, EventTimer, StreamFailed, connect

PAUSE_SECS = 0.05
"""Of a client that was refused."""
MOST_OPEN = 4000
"""Connections that are open at once; a request beyond them is not sent, and counted."""


@dataclass(slots=True)
class Sent:
    """One request: the times of its sending, its first event, its last one and its end.

    Times are seconds of one clock, 0 for what did not happen. `events` are those that came,
    `refusal` is the reason of the server, "" for an answer.
    """

    at: float
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    events: int = 0
    refusal: str = ""

    @property
    def complete(self) -> bool:
        """Whether the whole answer came."""
        return bool(self.ended) and not self.refusal

    def waited(self, until: float) -> float:
        """Seconds to the first event, at least those until the end of the load."""
        return (self.first or max(until, self.ended)) - self.at


@dataclass(frozen=True, slots=True)
class Flow:
    """Requests at a steady rate: a slow server delays none."""

    per_sec: float
    request: Callable[[int], bytes]


def answered(
    address: Address, groups: Sequence[Sequence[bytes]], secs: float
) -> Sequence[Sequence[Sent]]:
    """The requests of groups of clients; each repeats its own one for a time."""
    return uvloop.run(_answered(address, groups, secs))


async def _answered(
    address: Address, groups: Sequence[Sequence[bytes]], secs: float
) -> Sequence[Sequence[Sent]]:
    found: list[list[Sent]] = [[] for _ in groups]
    clients = [
        asyncio.create_task(_repeat(address, request, sent))
        for group, sent in zip(groups, found, strict=True)
        for request in group
    ]
    await asyncio.wait(clients, timeout=secs)
    for each in clients:
        each.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return found


async def _repeat(address: Address, request: bytes, sent: list[Sent]) -> None:
    while True:
        one = Sent(time.perf_counter())
        sent.append(one)
        await _ask(address, request, one)
        if one.refusal:
            await asyncio.sleep(PAUSE_SECS)


def send(
    address: Address, flows: Sequence[Flow], secs: float, grace_secs: float = 0.0
) -> Sequence[Sequence[Sent]]:
    """Send the requests of each flow for a time; what is open after the grace time is dropped."""
    return uvloop.run(_send(address, flows, secs, grace_secs))


async def _send(
    address: Address, flows: Sequence[Flow], secs: float, grace_secs: float
) -> Sequence[Sequence[Sent]]:
    found: list[list[Sent]] = [[] for _ in flows]
    began = time.perf_counter()
    asked: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as tasks:
        for flow, sent in zip(flows, found, strict=True):
            tasks.create_task(_flow(address, flow, began, secs, sent, asked))
    if asked and grace_secs:
        await asyncio.wait(asked, timeout=grace_secs)
    for each in tuple(asked):
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    return found


async def _flow(
    address: Address,
    flow: Flow,
    began: float,
    secs: float,
    sent: list[Sent],
    asked: set[asyncio.Task[None]],
) -> None:
    for number in count():
        due = began + number / flow.per_sec
        if due > began + secs:
            return
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if len(asked) >= MOST_OPEN:
            sent.append(Sent(time.perf_counter(), refusal="not sent"))
            continue
        one = Sent(time.perf_counter())
        sent.append(one)
        task = asyncio.create_task(_ask(address, flow.request(number), one))
        asked.add(task)
        task.add_done_callback(asked.discard)


async def _ask(address: Address, request: bytes, sent: Sent) -> None:
    """Send one request, and note what comes; a connection that fails is a refusal."""
    transport = None
    timer: EventTimer | None = None
    try:
        transport, timer = await connect(address, lambda: EventTimer(request))
        await timer.done
    except StreamFailed as error:
        sent.refusal = str(error)
    except OSError as error:
        sent.refusal = error.strerror or str(error)
    finally:
        if timer is not None:
            _note(timer, sent)
        if transport is not None:
            transport.close()
    sent.ended = time.perf_counter()


def _note(timer: EventTimer, sent: Sent) -> None:
    arrivals = timer.arrivals
    sent.events = len(arrivals)
    with suppress(IndexError):
        sent.first, sent.last = arrivals[0], arrivals[-1]
