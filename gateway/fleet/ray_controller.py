"""The controller of a fleet on Ray: it makes and ends replicas, from what the cluster has now."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from gateway.errors import InferenceError
from gateway.fleet.ray_news import HeardNews, RolloutNews
from gateway.fleet.ray_repository import LeftOut, ModelFiles
from gateway.fleet.ray_rollout import FleetRollout
from gateway.fleet.ray_rollouts import FleetRollouts, RolloutStore
from gateway.fleet.ray_views import (
    NOT_READY,
    WITHOUT_PLACE,
    WORKING,
    ReplicaPhase,
    ReplicaView,
    for_clients,
)
from gateway.fleet.rolls import Roll, Split, StartPauses, by_use, late
from gateway.fleet.scaling import LEAST_NEED, ReplicaCount
from gateway.models.replicas import ReplicaRules

log = logging.getLogger("sluice.fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """The replicas of a model, the number that is wanted, and the reason of a lack.

    `description` is the one that is wanted, "" if none is known. `refusal` is the reason why no
    replica can start, for clients, if there is none; `known` as in `ModelNews`. Those of
    `candidate`, "" without one, have the candidate of a `rollout`.
    """

    model: str
    wanted: int
    need: float
    replicas: Sequence[ReplicaView]
    trouble: str = ""
    description: str = ""
    refusal: str = ""
    known: str = ""
    candidate: str = ""
    rollout: RolloutNews = field(default_factory=RolloutNews)

    @property
    def outdated(self) -> Sequence[ReplicaView]:
        """The replicas of earlier descriptions."""
        wanted = self.description, self.candidate
        return [each for each in self.replicas if wanted[0] and each.description not in wanted]


read_status = msgspec.json.Decoder(tuple[ModelStatus, ...]).decode
REACHED_SECS = 5.0
"""A replica that is ready for this time has been found by routers: it replaces others."""
MOST_READINGS = 4
"""Readings of the files in a decision: each follows the rollouts that the last one has changed."""


class Cluster(RolloutStore, Protocol):
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
    """The memory of one model: its rules and needs, and the replicas that failed at their start.

    A candidate has its own rolls and failures, so that stable is not held up. Those of `lost`
    descriptions had candidates that were rolled back.
    """

    def __init__(self, model: str, present: int) -> None:
        self.model = model
        self.rules: ReplicaRules | None = None
        self.count = ReplicaCount(present)
        self.roll, self.candidate_roll = Roll(), Roll()
        self.pauses, self.candidate_pauses = StartPauses(), StartPauses()
        self.candidate = ""
        self.candidate_rules: ReplicaRules | None = None
        self.lost: Set[str] = frozenset()

    def pauses_of(self, description: str) -> StartPauses:
        """The failures of replicas of a description."""
        is_candidate = self.candidate and description == self.candidate
        return self.candidate_pauses if is_candidate else self.pauses

    def take(self, files: ModelFiles, rollout: FleetRollout | None) -> None:
        """Take the rules of a model, and those of the candidate of its rollout."""
        is_held = rollout is not None and bool(rollout.candidates)
        self.rules = (files.kept or self.rules or files.rules) if is_held else files.rules
        description = "" if rollout is None else rollout.description
        has_candidate = description not in ("", self.rules.description)
        self.candidate_rules = files.rules if has_candidate else None
        before, self.candidate = self.candidate, description if has_candidate else ""
        self.lost = {*self.lost, before} - {"", self.candidate, self.rules.description}
        if before != self.candidate:
            self.candidate_pauses = StartPauses()
            self.candidate_roll.want(self.candidate)

    @property
    def trouble(self) -> str:
        """The reason of the last failure."""
        return self.pauses.trouble or self.candidate_pauses.trouble


class Controller:
    """The decisions for every model; what it remembers only delays them. Routers are `heard`.

    The last rules of a model hold while its configuration, or the repository, cannot be read.
    """

    def __init__(
        self,
        cluster: Cluster,
        files: Callable[[LeftOut], Mapping[str, ModelFiles | str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.heard = HeardNews(clock)
        self._cluster = cluster
        self.rollouts = FleetRollouts(cluster, self.heard, clock)
        self._read = files
        self._clock = clock
        self._tended: dict[str, _Tended] = {}
        self._since: dict[tuple[str, ReplicaPhase], float] = {}
        self._reached: set[str] = set()
        self._decided_at: float | None = None
        self._reached_secs = REACHED_SECS
        self._models: list[ModelStatus] = []

    def status(self) -> Sequence[ModelStatus]:
        """The models and their replicas, as they were at the last decision."""
        return self._models

    def decide(self) -> None:
        """Look at the cluster and the repository, and make, drain and remove replicas."""
        # The replicas that a controller finds have been reached before it was restarted.
        self._reached_secs = 0.0 if self._decided_at is None else REACHED_SECS
        seen = self._cluster.replicas()
        leaving = self._cluster.draining_nodes()
        self._advance()
        files = self._found_files(seen)
        models = sorted(files.keys() | {each.model for each in seen})
        self._tended = {model: self._tended.get(model) or _new(model, seen) for model in models}
        seen = [self._noticed(each) for each in seen]
        left = [each for each in seen if each.phase is not ReplicaPhase.ENDED]
        names = {each.name for each in left}
        self._since = {each: since for each, since in self._since.items() if each[0] in names}
        self._reached &= names
        models = sorted(files.keys() | {each.model for each in left})
        found = [
            self._tend(model, files.get(model), [r for r in left if r.model == model], leaving)
            for model in models
        ]
        self.rollouts.save()
        # A change is answered once the cluster has it.
        self._models = [replace(each, rollout=self._news(each.model)) for each in found]

    def _advance(self) -> None:
        """Pass the time of rollouts since the last decision, with the replicas of that one."""
        now = self._clock()
        secs = 0.0 if self._decided_at is None else now - self._decided_at
        self._decided_at = now
        self.rollouts.hear()
        for status in self._models:
            of_model, tended = self.rollouts.of(status.model), self._tended.get(status.model)
            if of_model is not None and tended is not None:
                working = [r for r in status.replicas if r.phase is not ReplicaPhase.DRAINING]
                trouble = for_clients(tended.candidate_pauses.trouble)
                of_model.advance(secs, working, self._reached, status.wanted, trouble)

    def _found_files(self, seen: Sequence[ReplicaView]) -> Mapping[str, ModelFiles | str]:
        """The files of the models, without the versions that their rollouts leave out."""
        descriptions: dict[str, set[str]] = {}
        for each in seen:
            descriptions.setdefault(each.model, set()).add(each.description)
        files: Mapping[str, ModelFiles | str] = {}
        try:
            for _ in range(MOST_READINGS):
                found = self._read(left_out := self.rollouts.left_out)
                files = {**found, **self.rollouts.read(found)}
                if self.rollouts.left_out == left_out:
                    self.rollouts.follow(files, descriptions)
                if self.rollouts.left_out == left_out:
                    break
                # They were read with versions that are candidates, or refused, from now on.
        except InferenceError as error:
            known = self._tended.keys() | {each.model for each in seen}
            return dict.fromkeys(known, error.message)
        return files

    def _noticed(self, replica: ReplicaView) -> ReplicaView:
        """The view of a replica, which ends if its start takes too long, and is then removed."""
        tended, now = self._tended[replica.model], self._clock()
        if replica.phase in WITHOUT_PLACE:
            self._since.pop((replica.name, ReplicaPhase.STARTING), None)
        secs = now - self._since.setdefault((replica.name, replica.phase), now)
        limit = (tended.rules or ReplicaRules()).start_secs
        if replica.phase is ReplicaPhase.STARTING and secs >= limit:
            replica = replace(replica, phase=ReplicaPhase.ENDED, reason=late(limit))
        if replica.phase is ReplicaPhase.READY:
            if replica.name not in self._reached and secs >= self._reached_secs:
                self._reached.add(replica.name)
                tended.pauses_of(replica.description).succeed()
        elif replica.phase is ReplicaPhase.ENDED:
            about = {"model": replica.model, "replica": replica.name, "reason": replica.reason}
            log.info("replica ended", extra=about)
            if replica.name not in self._reached and replica.reason:
                tended.pauses_of(replica.description).fail(replica.reason, now)
            self._cluster.remove(replica.name)
        return replica

    def _tend(
        self,
        model: str,
        files: ModelFiles | str | None,
        replicas: Sequence[ReplicaView],
        leaving: frozenset[str],
    ) -> ModelStatus:
        tended, of_model = self._tended[model], self.rollouts.of(model)
        trouble = files.plan_refusal if isinstance(files, ModelFiles) else files or ""
        working = [each for each in replicas if each.phase is not ReplicaPhase.DRAINING]
        if isinstance(files, ModelFiles):
            tended.take(files, of_model)
        if files is None:
            tended.rules = None
            self._end(working)
        elif tended.rules is not None:
            lack = self._scale(tended, tended.rules, replicas, leaving)
            trouble = trouble or lack
        # A place may become free, or the cluster may grow; what cannot start is refused.
        phases = {each.phase for each in working}
        cannot_start = (
            tended.pauses.trouble or tended.rules is None or ReplicaPhase.INFEASIBLE in phases
        )
        description = "" if tended.rules is None else tended.rules.description
        return ModelStatus(
            model=model,
            wanted=0 if files is None else tended.count.target,
            need=sum(each.need for each in replicas) + self.heard.need(model),
            replicas=replicas,
            trouble=trouble,
            description=description,
            refusal=for_clients(trouble) if cannot_start and not phases & WORKING else "",
            known=self.heard.known(model, description),
            candidate=tended.candidate,
        )

    def _news(self, model: str) -> RolloutNews:
        of_model = self.rollouts.of(model)
        return RolloutNews() if of_model is None else of_model.news()

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
        self._end(each for each in working if each.description in tended.lost)
        working = [each for each in working if each.description not in tended.lost]
        staying = [each for each in working if not each.is_on(leaving)]
        wanted = self._wanted(tended, rules, working, staying)
        if (of_model := self.rollouts.of(tended.model)) is not None:
            of_model.weigh(working, self._reached, wanted)
        if tended.roll.want(rules.description):
            tended.pauses.succeed()
            about = {"model": tended.model, "description": rules.description}
            log.info("model changed", extra=about)
        if not wanted and tended.candidate_rules is None:
            tended.pauses.succeed()
        ready = [each for each in staying if each.phase is ReplicaPhase.READY]
        reached = [each for each in ready if each.name in self._reached]
        is_rolling = any(each.description != rules.description for each in staying)
        is_rolling = is_rolling or tended.candidate_rules is not None
        if is_rolling:
            self._roll(tended, rules, staying, wanted, drains=len(working) < len(replicas))
        else:
            self._change(tended, rules, staying)
        if len(reached) >= wanted:
            self._end([each for each in working if each.is_on(leaving)])
        if len(ready) >= wanted and not is_rolling:
            return ""
        return tended.trouble or _lack(rules, {each.phase for each in staying})

    def _wanted(
        self,
        tended: _Tended,
        rules: ReplicaRules,
        working: Sequence[ReplicaView],
        staying: Sequence[ReplicaView],
    ) -> int:
        """The number of replicas to have now, by the needs of replicas and routers."""
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
        return tended.count.want(rules, need, self._clock())

    def _roll(
        self,
        tended: _Tended,
        rules: ReplicaRules,
        staying: Sequence[ReplicaView],
        wanted: int,
        *,
        drains: bool,
    ) -> None:
        """Make and end replicas while there are some of several descriptions."""
        roll, split, new = tended.roll, Split(wanted, 0, wanted), rules
        of_model = self.rollouts.of(tended.model)
        if of_model is not None and tended.candidate_rules is not None:
            split = of_model.split(wanted)
            kept = [each for each in staying if each.description != tended.candidate]
            if any(each.description != rules.description for each in kept):
                # Stable has changed, too: its replicas are replaced first.
                staying, split = kept, Split(split.kept, 0, split.kept)
            else:
                roll, new = tended.candidate_roll, tended.candidate_rules
        reached = [each for each in staying if each.name in self._reached]
        reached = [each for each in reached if each.phase is ReplicaPhase.READY]
        step = roll.step(staying, reached, split, self._clock(), drains=drains)
        self._end(step.end)
        self._make(tended, new, step.make)
        self._make(tended, rules, step.restore)

    def _change(self, tended: _Tended, rules: ReplicaRules, staying: Sequence[ReplicaView]) -> None:
        """Make the replicas that lack, or end those of which there are too many."""
        lacking = tended.count.target - len(staying)
        self._make(tended, rules, lacking)
        if lacking < 0:
            self._end(by_use(staying)[:-lacking])

    def _make(self, tended: _Tended, rules: ReplicaRules, count: int) -> None:
        """Make some replicas, unless the pause after a failure lasts."""
        pauses = tended.pauses_of(rules.description)
        if count <= 0 or self._clock() < pauses.again_at:
            return
        about = {"model": tended.model, "count": count, "description": rules.description}
        try:
            for _ in range(count):
                self._cluster.make(tended.model, rules)
        except InferenceError as error:
            log.warning("replicas refused", extra={**about, "reason": error.message})
            pauses.fail(error.message, self._clock())
        else:
            log.info("replicas made", extra=about)

    def _end(self, replicas: Iterable[ReplicaView]) -> None:
        """Remove those that are not ready, and drain the others."""
        for each in replicas:
            about = {"model": each.model, "replica": each.name, "phase": each.phase}
            log.info("replica not needed", extra=about)
            end = self._cluster.remove if each.phase in NOT_READY else self._cluster.drain
            end(each.name)


def _new(model: str, seen: Iterable[ReplicaView]) -> _Tended:
    """The memory of a model that was unknown: it wants the replicas that it has, or had."""
    found = [each for each in seen if each.model == model]
    return _Tended(model, sum(each.phase is not ReplicaPhase.DRAINING for each in found))


def _lack(rules: ReplicaRules, phases: Set[ReplicaPhase]) -> str:
    """The place that a replica waits for, "" if none waits."""
    if not phases & WITHOUT_PLACE:
        return ""
    labels = ", ".join(f"{name}={value}" for name, value in rules.labels.items())
    free = "" if ReplicaPhase.INFEASIBLE in phases else " free"
    nodes = "the nodes do not have" if rules.bundles else "no node has"
    return f"{nodes} {rules.places}{free}" + (f" with {labels}" if labels else "")
