"""A router whose only replica comes and goes, and its requests that wait for it."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import InferenceError
from gateway.fleet.choice import ReplicaState
from gateway.fleet.instance import RoutedRequest
from gateway.fleet.waiting import WaitingRoom
from gateway.stream import ResponseStream
from tests.builders import TEXT, soon, text_request
from tests.gateway.fleet.fake_replica import FakeReplica, offered, until
from tests.gateway.fleet.routing import Routed

ZERO = replace(TEXT, parameters={"replicas": "0..4", "max_in_flight": "3"})
CHANGED = replace(ZERO, parameters={**ZERO.parameters, "number": "2"})
KEY = ("text", 1)


class Clock:
    """The time of the requests that wait."""

    now = 1000.0


class Fleet:
    """A router whose only replica comes and goes."""

    def __init__(self, routed: Routed, replica: FakeReplica) -> None:
        self.router, self.dataplane = routed
        self.replica = replica
        self.dataplane.fleet = self.router

    def infer(self, words: str = "hello", **fields: Any) -> ResponseStream:
        return self.dataplane.infer(text_request(words, **fields))

    @property
    def room(self) -> WaitingRoom[RoutedRequest]:
        return self.router._placed[KEY].instance.room  # noqa: SLF001 - nothing shows its times

    @property
    def timer(self) -> asyncio.TimerHandle:
        """The end of the wait of the only request."""
        (place,) = self.room._places.values()  # noqa: SLF001 - a wait has no other trace
        return place.timer

    def started(self, secs: float) -> None:
        """Let the router have seen a start of that length."""
        counts = self.router._placed[KEY].instance.counts  # noqa: SLF001 - none takes a minute
        counts.started(secs)

    async def goes(self) -> None:
        """Wait until the router has no replica that takes requests."""
        self.replica.offer(offered(ZERO), state=ReplicaState.DRAINING)
        await until(lambda: not self.router.connections[0].serves(KEY))

    def comes(self) -> None:
        self.replica.offer(offered(ZERO))

    @property
    def waiting(self) -> int:
        (model,) = self.router.describe()["models"]
        found: int = model["waiting"]
        return found

    async def answer(self, count: int = 1) -> list[str]:
        """Answer as many requests of the replica; their texts, in the order in which they came."""
        await until(lambda: len(self.replica.calls) >= count)
        calls, self.replica.calls[:] = self.replica.calls[:], []
        for each in calls:
            self.replica.answer(each, "hello")
        requests = [self.replica.requests[each] for each in calls]
        return [each.inputs[0].elements()[0].decode() for each in requests]


async def refused(stream: ResponseStream) -> InferenceError:
    with pytest.raises(InferenceError) as caught, stream:
        await soon(stream.only())
    return caught.value
