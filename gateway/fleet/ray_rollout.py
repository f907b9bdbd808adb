"""The rollouts of one model on Ray: its versions, their replicas, and the news for routers."""

import logging
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec

from gateway.errors import Code, InferenceError
from gateway.fleet.ray_evidence import FleetEvidence
from gateway.fleet.ray_news import RolloutAnswer, RolloutNews, Shares
from gateway.fleet.ray_repository import ModelFiles, refuse_unsupported
from gateway.fleet.ray_views import NOT_READY, WORKING, ReplicaView
from gateway.fleet.rolls import Split
from gateway.rollouts.blocks import FIRST_FAILURES
from gateway.rollouts.changes import ReadBeginning
from gateway.rollouts.ledger import RolloutLedger
from gateway.rollouts.plan import ALL, PlanStart, RolloutPlan, changed_plan
from gateway.rollouts.rollout import SERVER, Rollout, RolloutState, Transition
from gateway.rollouts.state import RolloutRecord

log = logging.getLogger("sluice.fleet")

MOST_SHOWN = 100
"""The latest transitions that routers get."""


class FleetRecord(RolloutRecord, kw_only=True):
    """The rollouts of one model on Ray, as they are in the state of the cluster.

    `weight` is that of routers. Replicas of the candidate have the description `candidate`; it is
    `promoted` after a promotion, until there are enough of them. `answers` are those to the latest
    requests, by their ids.
    """

    weight: float = 0.0
    candidate: str = ""
    promoted: str = ""
    answers: dict[str, RolloutAnswer] = msgspec.field(default_factory=dict)


class FleetRollout(RolloutLedger):
    """The rollouts of one model on Ray.

    Replicas of the candidate have the `description`, "" without one. `is_kept`: the cluster has a
    record.
    """

    record: FleetRecord
    evidence: FleetEvidence | None

    def __init__(self, record: FleetRecord, *, is_kept: bool) -> None:
        super().__init__(record, self._log)
        self.description = ""
        self.is_kept = is_kept
        self.saved_at = -math.inf
        self._files: ModelFiles | None = None
        self._evidence_of = -1
        self._attach()

    # Files.

    @property
    def candidates(self) -> Set[int]:
        """The versions that replicas of stable do not load."""
        rollout, files = self.open, self._files
        if rollout is None and not self._is_held:
            return frozenset()
        stable = self.record.stable if rollout is None else rollout.stable
        above = () if files is None else files.stamps
        own = () if rollout is None else (rollout.candidate,)
        return {*own, *(each for each in above if each > stable)}

    @property
    def refused(self) -> Set[int]:
        """The versions that were rolled back, unless the model has no other ones."""
        bad, files = self.record.bad.keys(), self._files
        return bad if files is None or files.stamps.keys() - bad else frozenset()

    def follow(self, files: ModelFiles) -> None:
        """Take the files of the model: a new highest version with a plan begins a rollout."""
        self._files, self.plan = files, files.plan
        record, highest = self.record, max(files.selected, default=0)
        before = record.bad, record.stable
        record.refuse(files.stamps, is_start=False)
        if (rollout := self.open) is not None:
            self._compare(rollout, highest, files.stamps)
        has_plan = files.plan is not None or bool(files.plan_refusal)
        if self.open is None and not self._is_held:
            is_new = record.stable in files.stamps and record.stable < highest
            if is_new and files.plan is not None:
                self.begin(record.stable, highest, files.plan, files.stamps)
            else:
                record.promoted = record.promoted if record.stable == highest else ""
                record.stable = highest
        elif self.open is not None and self.open.candidate not in files.selected:
            self.open.abort(SERVER, f"the policy selects version {self.open.candidate} no more")
        has_changed = before != (record.bad, record.stable) if self.is_kept else has_plan
        self.dirty = self.dirty or has_changed
        self.description = record.candidate = "" if self.open is None else files.rules.description
        self.changed()

    def begin(
        self, stable: int, candidate: int, plan: RolloutPlan, stamps: Mapping[int, str]
    ) -> Rollout:
        """See `RolloutLedger`."""
        self.record.weight, self.record.candidate, self.record.promoted = 0.0, "", ""
        begun = super().begin(stable, candidate, plan, stamps)
        # It is no loss that there is no replica yet.
        begun.candidate_able = False
        return begun

    def start(self, request: ReadBeginning, by: str) -> None:
        """Begin a rollout of the highest version, or one that waits; raises InferenceError.

        Its first step begins once routers have reached the replicas of the candidate.
        """
        version, reason = request.beginning.version, request.beginning.reason
        rollout, files = self.open, self._files
        if rollout is not None:
            is_waiting = rollout.state is RolloutState.WAITING
            is_manual = is_waiting and rollout.plan.start is PlanStart.MANUAL
            if rollout.candidate != version or not is_manual:
                self.require_none_open()
            rollout.plan = msgspec.structs.replace(rollout.plan, start=PlanStart.AUTOMATIC)
            rollout.by, rollout.reason, self.dirty = by, reason, True
            return
        if files is None:
            raise InferenceError(Code.UNAVAILABLE, "the files of the model have not been read yet")
        if version not in files.stamps:
            raise InferenceError(Code.NOT_FOUND, f"the model has no version {version}")
        if version < max((*files.selected, self.record.stable)) or version == self.record.stable:
            text = f"version is {version}, expected one above {self.record.stable} on Ray"
            raise InferenceError(Code.INVALID_ARG, text)
        if version in self.record.bad and not request.beginning.again:
            text = f"version {version} was rolled back, and has the same files"
            text += "; start it again with 'again' (--again)"
            raise InferenceError(Code.INVALID_ARG, text)
        if self.record.promoted:
            text = f"version {self.record.stable} was promoted, and has not all replicas yet"
            raise InferenceError(Code.UNAVAILABLE, f"{text}; start version {version} afterwards")
        own = {**request.plan, "start": PlanStart.AUTOMATIC}
        read = changed_plan(files.plan or RolloutPlan(), own, "request")
        refuse_unsupported(read, "request")
        self.record.bad.pop(version, None)
        begun = self.begin(self.record.stable, version, read, files.stamps)
        begun.by, begun.reason = by, reason

    # Time.

    def split(self, wanted: int) -> Split:
        """The numbers of replicas of both versions, in place of a number without a rollout."""
        weight = 0.0 if self.open is None else self.open.weight
        kept = max(1, math.ceil(wanted * (ALL - weight) / ALL))
        return Split(wanted, kept, max(1, math.ceil(wanted * weight / ALL)))

    def advance(
        self,
        secs: float,
        replicas: Sequence[ReplicaView],
        reached: Set[str],
        wanted: int,
        trouble: str,
    ) -> None:
        """Pass time, in which replicas of the candidate, and of stable, are able or not."""
        rollout, evidence = self.open, self.evidence
        if rollout is not None and evidence is not None and self.description:
            own = [each for each in replicas if each.description == self.description]
            is_enough = sum(each.name in reached for each in own) >= self.split(wanted).new
            if rollout.state is not RolloutState.WAITING:
                self._note_able(rollout, own, replicas, secs, trouble)
            elif is_enough and rollout.plan.start is PlanStart.AUTOMATIC:
                rollout.begin()
            is_shared = is_enough and self.record.weight <= rollout.weight
            self._judge(rollout, evidence, secs if is_shared else 0.0)
            self.changed()

    def weigh(self, replicas: Sequence[ReplicaView], reached: Set[str], wanted: int) -> None:
        """Have the weight for which there are replicas."""
        weight = self.record.weight
        usable = [each.description for each in replicas if each.name in reached]
        if self.open is not None and self.description:
            self.record.weight = self._weight(self.open, usable, self.split(wanted))
        elif self.record.promoted and self._files is not None:
            files = self._files.kept or self._files.rules  # a newer version waits
            own = {self.record.promoted, files.description}
            new = sum(each in own for each in usable)
            share = min(1.0, new / max(1, wanted)) if new < len(usable) else 1.0
            self.record.weight = ALL * share
            self.record.promoted = self.record.promoted if share < 1 else ""
        self.dirty = self.dirty or weight != self.record.weight

    def changed(self) -> None:
        """See `RolloutLedger`."""
        rollout = self.record.rollout
        if rollout is None:
            return
        if self._note(rollout) and not rollout.open:
            if rollout.state is RolloutState.PROMOTED:
                self.record.promoted = self.record.candidate
            self._settle(rollout, {} if self._files is None else self._files.stamps)
            self._refuse_loser(rollout)
            self.description = ""
        else:
            self._attach()

    # Routers.

    def news(self) -> RolloutNews:
        """The rollouts for routers, with the answers to changes that are kept."""
        rollout, evidence = self.record.rollout, self.evidence
        answers = {} if self.dirty else self.record.answers
        if rollout is None:
            return RolloutNews(state=self.describe(), answers=answers)
        return RolloutNews(
            state=self.describe(),
            history=tuple(self.history[-MOST_SHOWN:]),
            shares=self._shares(rollout),
            is_open=rollout.open,
            evidence="" if evidence is None else self.evidence_id,
            guardrails=rollout.plan.guardrails,
            heard={} if evidence is None else evidence.heard,
            answers=answers,
        )

    @property
    def evidence_id(self) -> str:
        """The name of the present evidence."""
        return f"{self.record.salt}-{self._evidence_of}"

    def _shares(self, rollout: Rollout) -> Shares | None:
        keys, salt = rollout.plan.key, self.record.salt
        if rollout.open or self.record.promoted:
            return Shares(rollout.stable, rollout.candidate, self.record.weight, keys, salt)
        stable = self.record.stable
        other = rollout.stable if stable == rollout.candidate else rollout.candidate
        if self.plan is None and other not in self.record.bad:
            return None
        return Shares(stable, other, 0.0, keys, salt)

    # Parts.

    @property
    def _is_held(self) -> bool:
        """Whether versions above stable wait: for a plan, or for the roll of a promotion."""
        record, files = self.record, self._files
        if files is None:
            return False
        is_rolling = files.plan is not None and record.stable in files.stamps
        return bool((record.promoted and is_rolling) or (record.stable and files.plan_refusal))

    def _note_able(
        self,
        rollout: Rollout,
        own: Sequence[ReplicaView],
        replicas: Sequence[ReplicaView],
        secs: float,
        trouble: str,
    ) -> None:
        reason = "it has no replica"
        stable = any(each.phase in WORKING and each not in own for each in replicas)
        rollout.stable_changed(able=stable, reason=reason)
        able = any(each.phase in WORKING for each in own)
        # A replica that starts in place of a lost one takes its time.
        unable_secs = 0.0 if any(each.phase in NOT_READY for each in own) else secs
        rollout.candidate_changed(unable_secs, able=able, reason=trouble or reason)

    def _weight(self, rollout: Rollout, usable: Sequence[str], split: Split) -> float:
        """The weight for which both versions have replicas; it rises only for the candidate's."""
        new = usable.count(self.description)
        least = rollout.weight * min(1.0, new / split.new)
        lack = 1 - min(1.0, (len(usable) - new) / split.kept)
        most = least + (ALL - rollout.weight) * lack
        return min(max(least, self.record.weight), most) if new else 0.0

    def _judge(self, rollout: Rollout, evidence: FleetEvidence, secs: float) -> None:
        for breach in evidence.breaches():
            rollout.breach(breach.guardrail, breach.reason)
        if evidence.is_dead_on_arrival:
            rollout.dead_on_arrival(f"its first {FIRST_FAILURES} requests have failed")
        suspicious = bool(evidence.suspicious or evidence.unproven)
        failures = evidence.failures
        rollout.advance(secs, evidence.seen, suspicious=suspicious, failures=failures)

    def _attach(self) -> None:
        """Have the evidence of an open rollout, or a new one."""
        rollout = self.open
        if rollout is None:
            return
        if self.evidence is not None and rollout.evidence_of == self._evidence_of:
            return
        is_kept, self._evidence_of = self._evidence_of < 0, rollout.evidence_of
        self.evidence = FleetEvidence(rollout.plan.read_guardrails(), rollout.plan.alpha)
        if is_kept and self.record.evidence:
            try:
                self.evidence.load(self.record.evidence)
            except ValueError as error:
                rollout.restart_evidence(f"the kept evidence cannot be read: {error}")
                self._evidence_of = rollout.evidence_of

    def _log(self, change: Transition) -> None:
        rollout = self.record.rollout
        about: dict[str, Any] = {"model": self.record.model, "step": change.step + 1}
        if rollout is not None:
            about |= {"from": rollout.stable, "to": rollout.candidate}
        about |= {"weight": f"{change.weight:g}", "reason": change.reason, "by": change.by}
        log.info("rollout changed", extra={**about, "state": change.state})
