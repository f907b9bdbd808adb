"""The requests of one model that wait in a router for a first replica."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError, RetryLater
from gateway.fleet.choice import Demand
from gateway.fleet.metrics import ModelCounts
from gateway.fleet.placement import ReplicaPlacement
from gateway.fleet.scaling import LEAST_NEED, used_secs
from gateway.messages import InferRequest
from gateway.models.limits import Limits
from gateway.models.replicas import ReplicaRules
from gateway.observability.statistics import QUEUE_TIMEOUT

LOOK_SECS = 1.0
"""A silent replica that is back announces nothing: it is looked for once in this time."""
MOST_AT_ONCE = 16
"""Requests that are sent, or ended, in one turn of the event loop."""
US_PER_SEC, NS_PER_SEC = 1e6, 1e9

Coming = Callable[[str], str | None]
"""The reason why no replica of a model comes: "" if one may, None if it has none to come."""


class Waiter(Protocol):
    """A request that may wait for a replica."""

    request: InferRequest

    def demand(self) -> Demand:
        """Its demand now."""

    def begin(self, *, may_wait: bool) -> None:
        """Send it, or let it wait."""

    def refuse(self, error: InferenceError) -> None:
        """End it with an error."""


W = TypeVar("W", bound=Waiter)


@dataclass(slots=True)
class _Place:
    """The place of a request: its tokens, and the timer of its end."""

    tokens: int
    timer: asyncio.TimerHandle


class WaitingRoom(Generic[W]):
    """The requests of a version that has no replica that takes requests, and may get one.

    They are sent in their order once there is one, some in each turn of the event loop, or end with
    the reason why none comes. `counts` has the starts that requests have waited for. `prefill_rate`
    is the last known one of a replica. A model `goes_to_zero` by its rules; no request waits for
    another one. `coming` is that of addresses that are known by themselves, until it is set.
    """

    def __init__(
        self, config: ModelConfig, counts: ModelCounts, placement: ReplicaPlacement
    ) -> None:
        self.prefill_rate = 0.0
        self._name = config.name
        self._rules = ReplicaRules.read(config)
        self.goes_to_zero = not self._rules.least
        self._most = Limits.read(config).max_in_flight
        self._counts = counts
        self._placement = placement
        self.coming: Coming = lambda name: ""
        self._places: dict[W, _Place] = {}
        self._began_at: float | None = None
        self._used_until = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._turn: asyncio.Handle | None = None
        self._replaced = ""

    def __len__(self) -> int:
        return len(self._places)

    @property
    def reason(self) -> str | None:
        """As `Coming` has it."""
        return self._replaced or (self.coming(self._name) if self.goes_to_zero else None)

    @property
    def need(self) -> float:
        """The replicas that are needed for the requests here; see `gateway.fleet.scaling`."""
        if not self._places and self._now() >= self._used_until:
            return 0.0
        tokens = sum(each.tokens for each in self._places.values())
        per_replica = self.prefill_rate * self._rules.target_wait_secs
        return max(LEAST_NEED, tokens / per_replica if per_replica else 0.0)

    def takes(self, waiter: W) -> bool:
        """Whether a request waits here; raises RetryLater if it would wait for too long."""
        if not self.goes_to_zero and not self._places:
            return False
        if self._placement.is_ready:
            return self._takes_behind_others(waiter)
        if self._placement.holds(waiter.request):
            return False
        reason = self.reason
        if reason is None:
            return False
        now = self._now()
        if self._began_at is None or not (self._places or now < self._used_until):
            self._began_at = now
        self._used_until = max(self._used_until, now + used_secs(self._rules))
        if reason:
            raise self._refusal(reason)
        left = self._patience(waiter.request)
        if left < self._expected_at() - now < math.inf:
            raise self._late("one is being started")
        if len(self._places) >= self._most:
            text = f"{self._most} requests wait for it, the most that may ('max_in_flight')"
            raise self._late(f"one is being started, and {text}")
        self._add(waiter)
        return True

    def _takes_behind_others(self, waiter: W) -> bool:
        """Whether earlier requests have not been sent yet, although a replica is ready."""
        if not self._places:
            return False
        self._add(waiter)
        self.look()
        return True

    def take_over(self, before: "WaitingRoom[W]") -> Sequence[W]:
        """Continue the room of an earlier configuration; returns its requests in their order."""
        self.prefill_rate = before.prefill_rate
        self._began_at = before._began_at  # noqa: SLF001 - of the same class
        self._used_until = before._used_until  # noqa: SLF001
        waiters = list(before._places)  # noqa: SLF001
        for waiter in waiters:
            before.discard(waiter)
            self._add(waiter)
        return waiters

    def discard(self, waiter: W) -> None:
        """Remove a request that has ended, or is sent."""
        place = self._places.pop(waiter, None)
        if place is None:
            return
        place.timer.cancel()
        if waiter.request.sink is not None:
            waiter.request.sink.model_at = None
        if not self._places and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Send the requests if a replica is ready, end them if none comes."""
        if self._began_at is None and not self._places:
            return
        is_ready = self._placement.is_ready
        if is_ready and self._began_at is not None:
            self._counts.started(self._now() - self._began_at)
        if is_ready or self.reason:
            self._began_at = None
            if self._turn is None:
                self._clear()

    def replace(self, reason: str) -> None:
        """End the requests, also later ones: the version has been replaced."""
        self._replaced = reason
        self.look()

    def _clear(self) -> None:
        """Send or end the first requests, and the others in later turns."""
        self._turn = None
        is_ready, reason = self._placement.is_ready, self.reason
        if not is_ready and not reason:
            return
        for waiter in list(islice(self._places, MOST_AT_ONCE)):
            self.discard(waiter)
            if is_ready:
                waiter.begin(may_wait=False)
            else:
                waiter.refuse(self._refusal(reason or ""))
        if self._places:
            self._turn = asyncio.get_running_loop().call_soon(self._clear)

    def _add(self, waiter: W) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._patience(waiter.request), self._expire, waiter)
        self._places[waiter] = _Place(waiter.demand().tokens, timer)
        if waiter.request.sink is not None:
            waiter.request.sink.model_at = self._expected_at()
        if self._timer is None:
            self._timer = loop.call_later(LOOK_SECS, self._look_again)

    def _look_again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECS, self._look_again)
        self.look()

    def _expire(self, waiter: W) -> None:
        self.discard(waiter)
        if self._most_secs(waiter.request) < self._limit:
            text = f"{QUEUE_TIMEOUT}: model '{self._name}' has no replica yet"
            waiter.refuse(InferenceError(Code.UNAVAILABLE, text))
            return
        text = f"one is being started, and a request waits for {self._limit:g} s at most"
        waiter.refuse(self._late(text))

    def _most_secs(self, request: InferRequest) -> float:
        """The time for which a request may wait, from its arrival."""
        return min(self._limit, request.timeout_us / US_PER_SEC or math.inf)

    def _patience(self, request: InferRequest) -> float:
        """The time for which a request may still wait."""
        waited_ns = time.perf_counter_ns() - request.received_ns if request.received_ns else 0
        return max(0.0, self._most_secs(request) - waited_ns / NS_PER_SEC)

    def _expected_at(self) -> float:
        """The time at which a replica is expected; infinite before the first start."""
        mean, began_at = self._counts.start_secs, self._began_at
        return math.inf if mean is None or began_at is None else began_at + mean

    @property
    def _limit(self) -> float:
        return self._rules.cold_start_secs

    def _refusal(self, reason: str) -> InferenceError:
        return InferenceError(
            Code.UNAVAILABLE, f"model '{self._name}' has no replica, and none can start: {reason}"
        )

    def _late(self, why: str) -> RetryLater:
        left = self._expected_at() - self._now()
        secs = 1 if math.isinf(left) else max(1, math.ceil(left))
        about = "" if math.isinf(left) else f", expected in about {secs} s"
        return RetryLater(f"model '{self._name}' has no replica; {why}{about}", secs)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
