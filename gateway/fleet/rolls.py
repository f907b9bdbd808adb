"""A roll: replicas of a new description of a model come, and those of earlier ones end."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from gateway.fleet.ray_views import NOT_READY, ReplicaPhase, ReplicaView

log = logging.getLogger("sluice.fleet")

PLACE_SECS = 10.0
"""A new replica without a place for this time gets that of an old one."""
MOST_DESCRIPTIONS = 16
"""The last descriptions whose order is known."""


class RollStep(NamedTuple):
    """The number of replicas to make now, and those to end."""

    make: int
    end: Sequence[ReplicaView]


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
        wanted: int,
        now: float,
        *,
        drains: bool,
    ) -> RollStep:
        """The next step, with some replicas of earlier descriptions.

        Requests can go to those that are `reached`; `drains`: one is ending.
        """
        description = self._wanted[-1]
        new = [each for each in staying if each.description == description]
        old = [each for each in staying if each.description != description]
        end = self._ready_in_order(old)[: max(0, len(reached) - wanted)]
        if end or drains:
            self._placeless_since = None
        elif self._lacks_place(new, now) and _ready(staying) >= wanted:
            end = self._give_place(old, new)
        starting = [each for each in old if each.phase in NOT_READY]
        ending = [*starting, *end]
        present = len(staying) - len(ending)
        is_over = len(ending) == len(old)
        waits = any(each.phase in NOT_READY for each in new)
        most = wanted if is_over or waits or not wanted else wanted + 1
        return RollStep(max(0, most - present), ending)

    def _ready_in_order(self, old: Sequence[ReplicaView]) -> list[ReplicaView]:
        """The ready ones: those of the latest description first, then an idle before a busy one."""
        order = {description: place for place, description in enumerate(self._wanted)}
        ready = [each for each in old if each.phase is ReplicaPhase.READY]
        return sorted(ready, key=lambda each: (-order.get(each.description, -1), each.need))

    def _lacks_place(self, new: Sequence[ReplicaView], now: float) -> bool:
        if not any(each.phase is ReplicaPhase.PENDING for each in new):
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


def _ready(replicas: Sequence[ReplicaView]) -> int:
    return sum(each.phase is ReplicaPhase.READY for each in replicas)
