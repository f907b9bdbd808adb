"""Rollouts on Ray: the controller decides for all replicas, and keeps the state in the cluster."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import msgspec

from gateway.errors import Code, InferenceError
from gateway.fleet.ray_evidence import FleetEvidence
from gateway.fleet.ray_news import (
    HeardNews,
    RolloutAnswer,
    RolloutNews,
    RolloutRequest,
    Shares,
)
from gateway.fleet.ray_repository import LeftOut, ModelFiles, refuse_unsupported
from gateway.fleet.ray_views import NOT_READY, WORKING, ReplicaView
from gateway.fleet.rolls import Split
from gateway.rollouts.blocks import FIRST_FAILURES
from gateway.rollouts.changes import (
    ChangeableRollouts,
    ReadBeginning,
    RolloutAction,
    read_beginning,
)
from gateway.rollouts.ledger import RolloutLedger
from gateway.rollouts.plan import ALL, PlanStart, RolloutPlan, changed_plan
from gateway.rollouts.rollout import SERVER, Rollout, RolloutState, Transition
from gateway.rollouts.state import FORMAT, RolloutRecord

log = logging.getLogger("sluice.fleet")

SAVE_SECS = 10.0
"""Time between two writes of an open rollout without transitions."""
MOST_ANSWERS, MOST_SHOWN = 100, 100
"""The latest answers to requests, and transitions of the history, that routers get."""


class RolloutStore(Protocol):
    """The records of rollouts in the state of a cluster; each call raises InferenceError."""

    def read_record(self, model: str) -> bytes | None:
        """The record of a model, if there is one."""

    def write_record(self, model: str, record: bytes) -> None:
        """Replace the record of a model."""


class FleetRollout(RolloutLedger):
    """The rollouts of one model on Ray.

    Replicas of the candidate have the `description`, "" without one. `answers` are those to the
    latest requests, by their ids.
    """

    evidence: FleetEvidence | None

    def __init__(self, record: RolloutRecord) -> None:
        super().__init__(record, self._log)
        self.description = ""
        self.answers: dict[str, RolloutAnswer] = {}
        self.saved_at = -math.inf
        self._files: ModelFiles | None = None
        self._weight = 0.0 if self.open is None else self.open.weight
        self._evidence_of = -1
        self._attach()

    # Files.

    @property
    def candidates(self) -> Set[int]:
        """The versions that replicas of stable do not load."""
        rollout, files = self.open, self._files
        is_held = files is not None and files.plan_refusal and self.record.stable
        if rollout is None and not is_held:
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
        bad = record.bad
        record.refuse(files.stamps, is_start=False)
        self.dirty = self.dirty or record.bad != bad
        if (rollout := self.open) is not None:
            self._compare(rollout, highest, files.stamps)
        if self.open is None and not files.plan_refusal:
            is_new = record.stable in files.stamps and record.stable < highest
            if is_new and files.plan is not None:
                self.begin(record.stable, highest, files.plan, files.stamps)
            elif record.stable != highest:
                record.stable, self.dirty = highest, self.dirty or files.plan is not None
        elif self.open is not None and self.open.candidate not in files.selected:
            self.open.abort(SERVER, f"the policy selects version {self.open.candidate} no more")
        self.description = "" if self.open is None else files.rules.description
        self.changed()

    def start(self, request: ReadBeginning, by: str) -> None:
        """Begin a rollout of the highest version, or one that waits; raises InferenceError."""
        version, reason = request.beginning.version, request.beginning.reason
        rollout, files = self.open, self._files
        if rollout is not None:
            if rollout.candidate != version:
                text = f"a rollout of version {rollout.candidate} is {rollout.state}"
                raise InferenceError(Code.ALREADY_EXISTS, f"{text}; promote or abort it first")
            rollout.start(by, reason)
            self.changed()
            return
        if files is None or version not in files.stamps:
            raise InferenceError(Code.NOT_FOUND, f"the model has no version {version}")
        if version < max((*files.selected, self.record.stable)) or version == self.record.stable:
            text = f"version is {version}, expected one above {self.record.stable} on Ray"
            raise InferenceError(Code.INVALID_ARG, text)
        if version in self.record.bad and not request.beginning.again:
            text = f"version {version} was rolled back, and has the same files"
            text += "; start it again with 'again' (--again)"
            raise InferenceError(Code.INVALID_ARG, text)
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
        if rollout is None or evidence is None or not self.description:
            return
        own = [each for each in replicas if each.description == self.description]
        stable = [each for each in replicas if each.description != self.description]
        least = self.split(wanted).new
        usable = sum(each.name in reached for each in own)
        if rollout.state is RolloutState.WAITING:
            if usable >= least and rollout.plan.start is PlanStart.AUTOMATIC:
                rollout.begin()
        else:
            reason = "it has no replica"
            rollout.stable_changed(able=any(r.phase in WORKING for r in stable), reason=reason)
            able = any(each.phase in WORKING for each in own)
            # A replica that starts in place of a lost one takes its time.
            unable_secs = 0.0 if any(each.phase in NOT_READY for each in own) else secs
            rollout.candidate_changed(unable_secs, able=able, reason=trouble or reason)
        self._judge(rollout, evidence, secs if usable >= least else 0.0)
        self.changed()
        self._weight = rollout.weight * min(1.0, usable / self.split(wanted).new)

    def changed(self) -> None:
        """See `RolloutLedger`."""
        rollout = self.record.rollout
        if rollout is None:
            return
        if self._note(rollout) and not rollout.open:
            self._settle(rollout, {} if self._files is None else self._files.stamps)
            self._refuse_loser(rollout)
            self.description = ""
        else:
            self._attach()

    # Routers.

    def news(self) -> RolloutNews:
        """The rollouts for routers."""
        rollout, evidence = self.record.rollout, self.evidence
        if rollout is None:
            return RolloutNews(state=self.describe(), answers=self.answers)
        return RolloutNews(
            state=self.describe(),
            history=tuple(self.history[-MOST_SHOWN:]),
            shares=self._shares(rollout),
            is_open=rollout.open,
            evidence="" if evidence is None else self.evidence_id,
            guardrails=rollout.plan.guardrails,
            heard={} if evidence is None else evidence.heard,
            answers=self.answers,
        )

    @property
    def evidence_id(self) -> str:
        """The name of the present evidence."""
        return f"{self.record.salt}-{self._evidence_of}"

    def _shares(self, rollout: Rollout) -> Shares | None:
        keys, salt = rollout.plan.key, self.record.salt
        if rollout.open:
            return Shares(rollout.stable, rollout.candidate, self._weight, keys, salt)
        stable = self.record.stable
        other = rollout.stable if stable == rollout.candidate else rollout.candidate
        if self.plan is None and other not in self.record.bad:
            return None
        return Shares(stable, other, 0.0, keys, salt)

    # Parts.

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


class FleetRollouts(ChangeableRollouts):
    """The rollouts of all models on Ray; `heard` has the counts and requests of routers."""

    def __init__(self, store: RolloutStore, heard: HeardNews, clock: Callable[[], float]) -> None:
        self._store = store
        self._heard = heard
        self._clock = clock
        self._models: dict[str, FleetRollout] = {}

    def of(self, model: str) -> FleetRollout | None:
        """The rollouts of a model."""
        return self._models.get(model)

    @property
    def left_out(self) -> LeftOut:
        """The versions that replicas do not load."""
        return LeftOut(
            {name: {*each.refused} for name, each in self._models.items() if each.refused},
            {name: each.candidates for name, each in self._models.items() if each.candidates},
        )

    def read(self, models: Iterable[str]) -> bool:
        """Have the records of models; whether there are new ones. Raises InferenceError."""
        new = [model for model in models if model not in self._models]
        for model in new:
            self._models[model] = FleetRollout(self._record(model))
        return bool(new)

    def follow(self, files: Mapping[str, ModelFiles | str]) -> None:
        """Take the files of the models."""
        for model, found in files.items():
            if not isinstance(found, str):
                self._models[model].follow(found)

    def has_one(self, model: str) -> bool:
        """Whether a model has had a rollout."""
        of_model = self._models.get(model)
        return of_model is not None and of_model.record.rollout is not None

    def hear(self) -> None:
        """Take the requests of routers that are new, and their counts."""
        for change in self._heard.changes():
            of_model = self._models.get(change.model)
            if of_model is not None and change.id not in of_model.answers:
                answers = {**of_model.answers, change.id: self._answer(of_model, change)}
                of_model.answers = dict([*answers.items()][-MOST_ANSWERS:])
        for model, of_model in self._models.items():
            if of_model.evidence is not None:
                of_model.evidence.take(self._heard.evidence(model, of_model.evidence_id))

    def save(self) -> None:
        """Keep what has changed, and open rollouts each SAVE_SECS; a failure is tried again."""
        now = self._clock()
        for model, each in self._models.items():
            is_time = each.open is not None and now - each.saved_at >= SAVE_SECS
            if not (each.dirty or is_time):
                continue
            each.saved_at = now
            try:
                self._store.write_record(model, each.encoded())
            except InferenceError as error:
                each.dirty = True
                log.error("rollout not kept", extra={"model": model, "reason": error.message})

    def _record(self, model: str) -> RolloutRecord:
        kept = self._store.read_record(model)
        if kept is None:
            return RolloutRecord(model=model)
        try:
            found = msgspec.json.decode(kept, type=RolloutRecord)
        except msgspec.DecodeError as error:
            log.error("rollout not read", extra={"model": model, "reason": str(error)})
            return RolloutRecord(model=model)
        return found if found.format == FORMAT else RolloutRecord(model=model)

    def _answer(self, of_model: FleetRollout, change: RolloutRequest) -> RolloutAnswer:
        try:
            if change.action is RolloutAction.START:
                of_model.start(read_beginning(change.members), change.by)
            else:
                self.change(change.model, change.action, change.members, change.by)
        except InferenceError as error:
            return RolloutAnswer(error.message, error.code)
        return RolloutAnswer()

    def _change(self, name: str, change: Callable[[Rollout], None]) -> None:
        of_model = self._models[name]
        if of_model.record.rollout is None:
            raise InferenceError(Code.INVALID_ARG, f"model '{name}' has no rollout")
        change(of_model.record.rollout)
        of_model.changed()
