"""A roll: replicas of a new description of a model come, and those of earlier ones end."""

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gateway.fleet.ray_views import NOT_READY, PHASES, ReplicaPhase, ReplicaView

log = logging.getLogger("sluice.fleet")

PLACE_SECS = 10.0
"""A new replica without a place for this time gets that of an old one."""
FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 1.0, 60.0
"""Pause before a replica in place of one that routers did not reach; doubled each time."""
MOST_DESCRIPTIONS = 16
"""The last descriptions whose order is known."""


class Split(NamedTuple):
    """The replicas that a model needs: `new` ones, and `kept` ones of earlier descriptions.

    Without kept ones all `wanted` are to be new. A rollout keeps some.
    """

    wanted: int
    kept: int
    new: int


class RollStep(NamedTuple):
    """The numbers of new replicas, and of kept ones, to make now, and those to end."""

    make: int
    restore: int
    end: Sequence[ReplicaView]


class StartPauses:
    """The replicas of a description that failed at their start: each makes the next one wait."""

    def __init__(self) -> None:
        self.trouble = ""
        self.again_at = 0.0
        self._failures = 0

    def fail(self, reason: str, now: float) -> None:
        """Count a replica that ended before routers reached it."""
        self.again_at = now + min(LONGEST_PAUSE_SECS, FIRST_PAUSE_SECS * 2**self._failures)
        self._failures += 1
        self.trouble = reason

    def succeed(self) -> None:
        """Forget failures: routers have reached a replica."""
        self._failures, self.again_at, self.trouble = 0, 0.0, ""


class Roll:
    """The roll of one model, one replica at a time; what it remembers only delays and orders.

    A new replica comes before an old one ends. If no node has a place for it, an old one ends
    first, unless fewer replicas than the wanted number are ready.
    """

    def __init__(self) -> None:
        self._wanted: list[str] = []
        self._placeless_since: float | None = None

    def want(self, description: str) -> bool:
        """Whether another description was wanted before."""
        before = self._wanted
        others = [each for each in before if each != description]
        self._wanted = [*others[-MOST_DESCRIPTIONS:], description]
        if before[-1:] in ([], [description]):
            return False
        self._placeless_since = None
        return True

    def step(
        self,
        staying: Sequence[ReplicaView],
        reached: Sequence[ReplicaView],
        split: Split,
        now: float,
        *,
        drains: bool,
    ) -> RollStep:
        """The next step, with some replicas of earlier descriptions.

        Requests can go to those that are `reached`; `drains`: one is ending.
        """
        description, total = self._wanted[-1], split.kept + split.new
        new = [each for each in staying if each.description == description]
        old = [each for each in staying if each.description != description]
        starting = [each for each in old if each.phase in NOT_READY][: _above(old, split.kept)]
        spare = _above(old, split.kept) - len(starting)
        end = self._ready_in_order(old)[: min(_above(reached, split.wanted), spare)]
        # Of too many new ones each ready one ends in place of a kept one that routers have reached.
        extra = by_use(new)[: _above(new, split.new)] if split.kept else []
        surplus = sum(each.phase in NOT_READY for each in extra)
        surplus += max(0, _above(reached, split.wanted) - len(end))
        if end or drains:
            self._placeless_since = None
        elif self._lacks_place(old if extra else new, now) and _ready(staying) >= split.wanted:
            if extra:
                surplus += 1
            elif _ready(old) > bool(split.kept):
                end = self._give_place(old, new)
        ending = [*starting, *end, *extra[:surplus]]
        left = len(old) - len(starting) - len(end)
        present = len(staying) - len(ending)
        waits = any(each.phase in NOT_READY for each in new)
        most = total if left <= split.kept or waits or not split.wanted else split.wanted + 1
        # A new one that waits for a place has that of a kept one.
        least = split.kept - (split.kept > 1 and any(map(_waits_for_place, new)))
        restore = min(max(0, least - left), max(0, max(total, split.wanted + 1) - present))
        make = min(most - present - restore, split.new - len(new))
        return RollStep(max(0, make), restore, ending)

    def _ready_in_order(self, old: Sequence[ReplicaView]) -> list[ReplicaView]:
        """The ready ones: those of the latest description first, then an idle before a busy one."""
        order = {description: place for place, description in enumerate(self._wanted)}
        ready = [each for each in old if each.phase is ReplicaPhase.READY]
        return sorted(ready, key=lambda each: (-order.get(each.description, -1), each.need))

    def _lacks_place(self, new: Sequence[ReplicaView], now: float) -> bool:
        if not any(map(_waits_for_place, new)):
            self._placeless_since = None
            return False
        if self._placeless_since is None:
            self._placeless_since = now
        return now - self._placeless_since >= PLACE_SECS

    def _give_place(
        self, old: Sequence[ReplicaView], new: Sequence[ReplicaView]
    ) -> list[ReplicaView]:
        """One replica that ends before a new one is ready."""
        found = self._ready_in_order(old)[:1]
        for each in found:
            extra = {"model": each.model, "replica": each.name}
            if _ready(old) + _ready(new) == 1:
                log.warning("no replica until a new one is ready", extra=extra)
            else:
                log.info("replica ends for the place of a new one", extra=extra)
        return found


def late(limit_secs: float) -> str:
    """The reason of the end of a replica whose start takes longer than its limit."""
    return (
        f"it has not become ready within {limit_secs:g} s of its start: look at the log of its "
        "actor, or set a higher 'start_limit_secs' in the parameters of its config.pbtxt"
    )


def by_use(replicas: Iterable[ReplicaView]) -> list[ReplicaView]:
    """Replicas in the order in which they are ended: an idle before a busy one."""
    return sorted(replicas, key=lambda each: (PHASES.index(each.phase), each.need))


def _ready(replicas: Sequence[ReplicaView]) -> int:
    return sum(each.phase is ReplicaPhase.READY for each in replicas)


def _waits_for_place(replica: ReplicaView) -> bool:
    return replica.phase is ReplicaPhase.PENDING


def _above(replicas: Sequence[ReplicaView], count: int) -> int:
    """The number of replicas beyond a count."""
    return max(0, len(replicas) - count)
