"""The controller of a fleet on Ray: it makes and ends replicas, from what the cluster has now."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import msgspec

from gateway.errors import InferenceError
from gateway.fleet.ray_news import HeardNews
from gateway.fleet.ray_views import NOT_READY, PHASES, ReplicaPhase, ReplicaView
from gateway.fleet.rolls import Roll
from gateway.fleet.scaling import LEAST_NEED, ReplicaCount
from gateway.models.replicas import ReplicaRules

log = logging.getLogger("sluice.fleet")

FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 1.0, 60.0
"""Pause before a replica in place of one that routers did not reach; doubled each time."""


WORKING = {ReplicaPhase.READY, ReplicaPhase.SILENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """The replicas of a model, the number that is wanted, and the reason of a lack.

    `description` is the one that is wanted, "" if none is known. `refusal` is the reason why no
    replica can start, if there is none; `known` as in `ModelNews`.
    """

    model: str
    wanted: int
    need: float
    replicas: Sequence[ReplicaView]
    trouble: str = ""
    description: str = ""
    refusal: str = ""
    known: str = ""

    @property
    def outdated(self) -> Sequence[ReplicaView]:
        """The replicas of earlier descriptions."""
        wanted = self.description
        return [each for each in self.replicas if wanted and each.description != wanted]


read_status = msgspec.json.Decoder(tuple[ModelStatus, ...]).decode
REACHED_SECS = 5.0
"""A replica that is ready for this time has been found by routers: it replaces others."""


class Cluster(Protocol):
    """The replicas of a fleet in a cluster; each call may take a second."""

    def replicas(self) -> Sequence[ReplicaView]:
        """Every replica that has not been removed."""

    def draining_nodes(self) -> frozenset[str]:
        """The nodes that are about to end."""

    def make(self, model: str, rules: ReplicaRules) -> None:
        """Begin a replica; UNAVAILABLE if the cluster refuses it."""

    def drain(self, name: str) -> None:
        """Let a replica complete its requests and end."""

    def remove(self, name: str) -> None:
        """End a replica now, and return its place."""


class _Tended:
    """The memory of one model: its rules and needs, and the replicas that failed at their start."""

    def __init__(self, model: str, present: int) -> None:
        self.model = model
        self.rules: ReplicaRules | None = None
        self.count = ReplicaCount(present)
        self.roll = Roll()
        self.failures = 0
        self.again_at = 0.0
        self.trouble = ""

    def fail(self, reason: str, now: float) -> None:
        """Count a replica that ended before routers reached it; the next one waits."""
        self.again_at = now + min(LONGEST_PAUSE_SECS, FIRST_PAUSE_SECS * 2**self.failures)
        self.failures += 1
        self.trouble = reason

    def succeed(self) -> None:
        """Forget failures: routers have reached a replica."""
        self.failures, self.again_at, self.trouble = 0, 0.0, ""


class Controller:
    """The decisions for every model; what it remembers only delays them. Routers are `heard`.

    The last rules of a model hold while its configuration, or the repository, cannot be read.
    """

    def __init__(
        self,
        cluster: Cluster,
        rules: Callable[[], Mapping[str, ReplicaRules | str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.heard = HeardNews(clock)
        self._cluster = cluster
        self._rules = rules
        self._clock = clock
        self._tended: dict[str, _Tended] = {}
        self._ready_since: dict[str, float] = {}
        self._reached: set[str] = set()
        self._models: list[ModelStatus] = []

    def status(self) -> Sequence[ModelStatus]:
        """The models and their replicas, as they were at the last decision."""
        return self._models

    def decide(self) -> None:
        """Look at the cluster and the repository, and make, drain and remove replicas."""
        seen = self._cluster.replicas()
        leaving = self._cluster.draining_nodes()
        try:
            rules = self._rules()
        except InferenceError as error:
            known = self._tended.keys() | {each.model for each in seen}
            rules = dict.fromkeys(known, error.message)
        models = sorted(rules.keys() | {each.model for each in seen})
        self._tended = {model: self._tended.get(model) or _new(model, seen) for model in models}
        for each in seen:
            self._notice(each)
        left = [each for each in seen if each.phase is not ReplicaPhase.ENDED]
        names = {each.name for each in left}
        self._ready_since = {
            name: since for name, since in self._ready_since.items() if name in names
        }
        self._reached &= names
        self._models = [
            self._tend(model, rules.get(model), [r for r in left if r.model == model], leaving)
            for model in sorted(rules.keys() | {each.model for each in left})
        ]

    def _notice(self, replica: ReplicaView) -> None:
        """Remove a replica that has ended; remember whether routers have reached it."""
        tended = self._tended[replica.model]
        if replica.phase is ReplicaPhase.READY:
            since = self._ready_since.setdefault(replica.name, self._clock())
            if replica.name not in self._reached and self._clock() - since >= REACHED_SECS:
                self._reached.add(replica.name)
                tended.succeed()
        elif replica.phase is ReplicaPhase.ENDED:
            about = {"model": replica.model, "replica": replica.name, "reason": replica.reason}
            log.info("replica ended", extra=about)
            if replica.name not in self._reached and replica.reason:
                tended.fail(replica.reason, self._clock())
            self._cluster.remove(replica.name)

    def _tend(
        self,
        model: str,
        rules: ReplicaRules | str | None,
        replicas: Sequence[ReplicaView],
        leaving: frozenset[str],
    ) -> ModelStatus:
        tended = self._tended[model]
        trouble = rules if isinstance(rules, str) else ""
        working = [each for each in replicas if each.phase is not ReplicaPhase.DRAINING]
        if not isinstance(rules, str):
            tended.rules = rules
        if rules is None:
            self._end(working)
        elif tended.rules is not None:
            lack = self._scale(tended, tended.rules, replicas, leaving)
            trouble = trouble or lack
        # A place may become free, or the cluster may grow; what cannot start is refused.
        phases = {each.phase for each in working}
        cannot_start = tended.trouble or tended.rules is None or ReplicaPhase.INFEASIBLE in phases
        description = "" if tended.rules is None else tended.rules.description
        return ModelStatus(
            model=model,
            wanted=0 if rules is None else tended.count.target,
            need=sum(each.need for each in replicas) + self.heard.need(model),
            replicas=replicas,
            trouble=trouble,
            description=description,
            refusal=trouble if cannot_start and not phases & WORKING else "",
            known=self.heard.known(model, description),
        )

    def _scale(
        self,
        tended: _Tended,
        rules: ReplicaRules,
        replicas: Sequence[ReplicaView],
        leaving: frozenset[str],
    ) -> str:
        """Change the number of replicas, and replace those of draining nodes and old descriptions.

        Returns the lack.
        """
        working = [each for each in replicas if each.phase is not ReplicaPhase.DRAINING]
        staying = [each for each in working if not each.is_on(leaving)]
        need = sum(each.need for each in working) + self.heard.need(tended.model)
        if not any(each.phase in WORKING for each in working):
            # Requests that wait for one start ask for one start.
            need = min(need, 1.0)
        if not rules.least and self.heard.lacks(tended.model, rules.description):
            # No router can know a description before it has had a replica.
            need = max(need, LEAST_NEED)
        if any(each.phase is ReplicaPhase.SILENT for each in staying):
            # The need of a silent replica is unknown: none is ended meanwhile.
            need = max(need, tended.count.target)
        wanted = tended.count.want(rules, need, self._clock())
        if tended.roll.want(rules.description):
            tended.succeed()
            about = {"model": tended.model, "description": rules.description}
            log.info("model changed", extra=about)
        if not wanted:
            tended.succeed()
        ready = [each for each in staying if each.phase is ReplicaPhase.READY]
        reached = [each for each in ready if each.name in self._reached]
        is_rolling = any(each.description != rules.description for each in staying)
        if is_rolling:
            drains = len(working) < len(replicas)
            step = tended.roll.step(staying, reached, wanted, self._clock(), drains=drains)
            self._end(step.end)
            self._make(tended, rules, step.make)
        else:
            self._change(tended, rules, staying)
        if len(reached) >= wanted:
            self._end([each for each in working if each.is_on(leaving)])
        if len(ready) >= wanted and not is_rolling:
            return ""
        return tended.trouble or _lack(rules, {each.phase for each in staying})

    def _change(self, tended: _Tended, rules: ReplicaRules, staying: Sequence[ReplicaView]) -> None:
        """Make the replicas that lack, or end those of which there are too many."""
        lacking = tended.count.target - len(staying)
        self._make(tended, rules, lacking)
        if lacking < 0:
            by_use = sorted(staying, key=lambda each: (PHASES.index(each.phase), each.need))
            self._end(by_use[:-lacking])

    def _make(self, tended: _Tended, rules: ReplicaRules, count: int) -> None:
        """Make some replicas, unless the pause after a failure lasts."""
        if count <= 0 or self._clock() < tended.again_at:
            return
        about = {"model": tended.model, "count": count, "description": rules.description}
        try:
            for _ in range(count):
                self._cluster.make(tended.model, rules)
        except InferenceError as error:
            log.warning("replicas refused", extra={**about, "reason": error.message})
            tended.fail(error.message, self._clock())
        else:
            log.info("replicas made", extra=about)

    def _end(self, replicas: Iterable[ReplicaView]) -> None:
        """Remove those that are not ready, and drain the others."""
        for each in replicas:
            about = {"model": each.model, "replica": each.name, "phase": each.phase}
            log.info("replica not needed", extra=about)
            if each.phase in NOT_READY:
                self._cluster.remove(each.name)
            else:
                self._cluster.drain(each.name)


def _new(model: str, seen: Iterable[ReplicaView]) -> _Tended:
    """The memory of a model that was unknown: it wants the replicas that it has, or had."""
    found = [each for each in seen if each.model == model]
    return _Tended(model, sum(each.phase is not ReplicaPhase.DRAINING for each in found))


def _lack(rules: ReplicaRules, phases: Set[ReplicaPhase]) -> str:
    """The place that a replica waits for, "" if none waits."""
    if not phases & {ReplicaPhase.INFEASIBLE, ReplicaPhase.PENDING}:
        return ""
    labels = ", ".join(f"{name}={value}" for name, value in rules.labels.items())
    free = "" if ReplicaPhase.INFEASIBLE in phases else " free"
    nodes = "the nodes do not have" if rules.bundles else "no node has"
    return f"{nodes} {rules.places}{free}" + (f" with {labels}" if labels else "")
