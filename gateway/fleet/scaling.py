"""The number of replicas that a model needs: shares of them, and the change of their number."""

import math
from collections import deque
from collections.abc import Callable, Iterable

from gateway.fleet.choice import Load
from gateway.fleet.offers import concurrency
from gateway.models.model import Model
from gateway.models.replicas import ReplicaRules

KV_SHARE = 0.8
"""The share of KV blocks in use at which a replica is fully used."""
TOLERANCE = 0.1
"""A need that differs from the number of replicas by less than this share changes nothing."""
LARGEST_STEP = 4
"""At most this many replicas are added at a time, or as many as there are."""
LEAST_NEED = 0.01
"""The need of a model that is in use: its last replica stays."""
USED_SECS = 60.0
"""A model is in use for this time after a request: metrics pages are read now and then."""


def need_of(model: Model, load: Load, idle_secs: float) -> float:
    """The need of a model at a replica, `idle_secs` after its last execution."""
    rules = ReplicaRules.read(model.config)
    found = need(load, concurrency(model), rules.target_wait_secs)
    is_used = not rules.least and (model.requests or idle_secs < used_secs(rules))
    return max(found, LEAST_NEED) if is_used else found


def used_secs(rules: ReplicaRules) -> float:
    """The time after a request for which a model that may have no replica is in use."""
    return min(USED_SECS, rules.to_zero_secs)


def need(load: Load, executions: int, target_wait_secs: float) -> float:
    """The replicas that the load of one replica would fully use; those of all replicas add up.

    `executions` is the number of its concurrent ones, for a model without tokens: each busy one is
    a part of the replica, and only the requests beyond them wait.
    """
    if load.prefill_rate:
        waiting_secs = load.waiting_tokens / load.prefill_rate
        return max(waiting_secs / target_wait_secs, load.kv_used / KV_SHARE)
    requests = load.queued + load.running
    busy = min(requests, executions)
    waiting_secs = (requests - busy) * load.step_secs / executions
    return max(waiting_secs / target_wait_secs, busy / executions)


class ReplicaCount:
    """The wanted number of replicas of one model, from the needs of the last minutes.

    More replicas are wanted once every need of `up_secs` was higher than their number, fewer, one
    at a time, once every need of `down_secs` was lower. The first one is wanted with any need, and
    the last one until there was none for `to_zero_secs`. A replica that is lost changes nothing.
    """

    def __init__(self, present: int) -> None:
        self.target = present
        self._wanted: deque[tuple[float, int]] = deque()

    def want(self, rules: ReplicaRules, needed: float, now: float) -> int:
        """The number of replicas to have now."""
        wanted = max(rules.least, min(rules.most, _settled(needed, self.target)))
        self._wanted.append((now, wanted))
        oldest = now - max(rules.up_secs, rules.down_secs, rules.to_zero_secs)
        while len(self._wanted) > 1 and self._wanted[1][0] <= oldest:
            self._wanted.popleft()
        self.target = self._next(rules, now)
        return self.target

    def _next(self, rules: ReplicaRules, now: float) -> int:
        target = self.target
        if not rules.least <= target <= rules.most:
            return max(rules.least, target - 1)
        if not target:
            return min(1, self._wanted[-1][1])
        up = self._of_last(rules.up_secs, min, now)
        if up is not None and up > target:
            self._wanted.clear()
            return min(up, target + max(target, LARGEST_STEP))
        down_secs = rules.down_secs if target > 1 else rules.to_zero_secs
        down = self._of_last(down_secs, max, now)
        return target - 1 if down is not None and down < target else target

    def _of_last(
        self, secs: float, choose: Callable[[Iterable[int]], int], now: float
    ) -> int | None:
        """The lowest or highest number of the last seconds; None if they are not known."""
        if self._wanted[0][0] > now - secs:
            return None
        return choose([wanted for at, wanted in self._wanted if at >= now - secs])


def _settled(needed: float, target: int) -> int:
    """A whole number of replicas; the present target if the need is about that."""
    if abs(needed - target) <= TOLERANCE * target:
        return target
    return math.ceil(needed)
