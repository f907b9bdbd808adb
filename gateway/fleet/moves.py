"""The moves of requests to other replicas, before they have begun: one timer for each model."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from random import Random
from typing import NamedTuple, Protocol

from gateway.fleet.choice import (
    SETTLED_SECS,
    Demand,
    KnownReplica,
    UnbegunRequest,
    ahead_now,
    moves,
)

TURN_SECS = 1.0
"""The time between two turns, in which requests are chosen for again."""
MOST_OF_TURN = 128
"""Requests of a turn, the oldest first: more would delay other requests."""


class Movable(Protocol):
    """A request without a response that another replica may execute instead."""

    def demand(self) -> Demand:
        """Its demand now."""

    def move(self, to: KnownReplica) -> None:
        """Leave its replica, which cancels it there, and send it to another one."""


class SentRequest(NamedTuple):
    """A sent request: its replica, the work before it then, and the time."""

    replica: KnownReplica
    ahead: int
    at: float


class WaitingRequests:
    """The requests of a model with much work before them at their replicas.

    While there are any, a turn a second moves those that another replica serves sooner. Turns of
    several routers are at different times, so that not all move their requests to the same replica.
    """

    def __init__(self, replicas: Callable[[], Iterable[KnownReplica]], random: Random) -> None:
        self._replicas = replicas
        self._random = random
        self._sent: dict[Movable, SentRequest] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, request: Movable, replica: KnownReplica, ahead: int) -> None:
        """Add a request that was sent now, if it has much work before it."""
        if ahead * replica.unit_secs < SETTLED_SECS:
            return
        loop = asyncio.get_running_loop()
        self._sent[request] = SentRequest(replica, ahead, loop.time())
        if self._timer is None:
            self._timer = loop.call_later(self._random.uniform(0, TURN_SECS), self._turn)

    def discard(self, request: Movable) -> None:
        """Remove a request that has a response, or has left its replica."""
        if self._sent.pop(request, None) is not None and not self._sent:
            self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(TURN_SECS, self._turn)
        requests: list[Movable] = []
        unbegun = list(islice(self._unsettled(requests, loop.time()), MOST_OF_TURN))
        for move in list(moves(unbegun, self._replicas(), now=loop.time())):
            request = requests[move.request.call]
            self.discard(request)
            request.move(move.to)
        if not self._sent:
            self._stop()

    def _unsettled(self, requests: list[Movable], now: float) -> Iterator[UnbegunRequest]:
        """The requests that may still move, with their places in `requests`."""
        for request, sent in list(self._sent.items()):
            ahead = ahead_now(sent.replica, sent.ahead, now - sent.at)
            if ahead * sent.replica.unit_secs < SETTLED_SECS:
                del self._sent[request]
                continue
            requests.append(request)
            yield UnbegunRequest(len(requests) - 1, request.demand(), sent.replica, ahead)
