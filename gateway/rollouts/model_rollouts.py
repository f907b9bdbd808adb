"""The rollouts of one model: what its loads may load, and its open rollout."""

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from gateway.conversations.conversations import Conversations
from gateway.errors import Code, InferenceError
from gateway.models.ensemble_members import LoadFailure
from gateway.models.labels import CANARY
from gateway.models.model import Model
from gateway.models.registry import STABLE, KnownModel, VersionState, VersionStatus
from gateway.models.repository import LoadSource
from gateway.rollouts.choice import VersionChoice
from gateway.rollouts.evidence import FIRST_FAILURES, Evidence
from gateway.rollouts.observation import Arm
from gateway.rollouts.plan import ALL, PlanStart, RolloutPlan
from gateway.rollouts.rollout import SERVER, Rollout, RolloutState, Transition
from gateway.rollouts.shadow import Shadow
from gateway.rollouts.state import MOST_TRANSITIONS, RolloutRecord, digest
from gateway.threads import Threads


class PlanFile(NamedTuple):
    """The plan of a model, None without a file, and the reason why none may begin by itself."""

    plan: RolloutPlan | None = None
    refusal: str = ""


class ModelRollouts:
    """The rollouts of one model, all synchronous.

    `noted` is called with each transition, `over` with the version that no new request gets after
    the end of a rollout. A `dirty` record is not on disk yet; an `unreadable` one stays there.
    """

    def __init__(
        self,
        known: KnownModel,
        record: RolloutRecord,
        conversations: Conversations,
        threads: Threads,
        noted: Callable[["ModelRollouts", Transition], None],
        over: Callable[["ModelRollouts", Model], None],
    ) -> None:
        self.known = known
        self.record = record
        self.choice: VersionChoice | None = None
        self.evidence: Evidence | None = None
        self.plan: RolloutPlan | None = None
        self.dirty, self.damaged, self.unreadable = False, False, ""
        self.encodings = 0
        self.draining: set[Model] = set()
        self._conversations = conversations
        self._threads = threads
        self._noted = noted
        self._over = over
        self._refusals: dict[int, str] = {}
        self._ticked: float | None = None
        self._attached: Rollout | None = None
        self._evidence_of = -1
        self._stamps: Mapping[int, str] = {}
        self._is_over = False
        self._known_transitions = 0 if self.open is None else len(self.open.transitions)

    @property
    def open(self) -> Rollout | None:
        """The open rollout."""
        found = self.record.rollout
        return found if found is not None and found.open else None

    # Loads.

    def admit(self, source: LoadSource, found: PlanFile) -> LoadSource:
        """The source of a load without versions that were rolled back; see `VersionGate`.

        A new highest version begins a rollout, and with it both versions are held.
        """
        self.plan = found.plan
        stamps = {number: digest(source.snapshot, number) for number in source.entry.available}
        self._refusals = self.record.refuse(stamps, is_start=not self.known.models)
        source = replace(source, refused=frozenset(self._refusals))
        if self.damaged:
            self._repair(source, stamps)
        highest = max(source.selected, default=0)
        rollout = self.open
        if rollout is not None:
            self._compare(rollout, highest, stamps)
        self._stamps = stamps
        is_fixed = self.plan is not None or self.open is not None or bool(self.draining)
        if not is_fixed and not self.record.keeps_stable(source.selected, stamps):
            self.record.stable, self.dirty = 0, self.dirty or bool(self.record.stable)
        stable = self.stable_of(source)
        if self.open is None and self.plan is not None and 0 < stable < highest:
            if found.refusal:
                self._refusals[highest] = found.refusal
                source = replace(source, refused=frozenset(self._refusals))
            else:
                self.begin(stable, highest, self.plan, stamps)
        self.hold(stable)
        return source

    def begin(
        self, stable: int, candidate: int, plan: RolloutPlan, stamps: Mapping[int, str]
    ) -> Rollout:
        """Have a new rollout, which waits until both versions are loaded."""
        self._keep_history()
        made = self.record.rollout = Rollout(stable=stable, candidate=candidate, plan=plan)
        self.record.salt = secrets.token_hex(8)
        self.record.stamps = {each: stamps.get(each, "") for each in (stable, candidate)}
        self.record.evidence = {}
        self.evidence, self._evidence_of = None, -1
        self.dirty = True
        return made

    def stable_of(self, source: LoadSource) -> int:
        """The version that answers requests without a version; 0 if none has."""
        rollout, available = self.open, source.available
        if rollout is not None:
            return rollout.stable
        if self.record.stable in available:
            return self.record.stable
        return max(
            (int(m.version) for m in self.known.models if int(m.version) in available), default=0
        )

    def hold(self, stable: int) -> None:
        """Hold the versions that the policy may not select, and set the labels of rollouts."""
        rollout, labels = self.open, self.known.labels
        own = {STABLE: stable} if stable and (self.plan is not None or self.record.stable) else {}
        if rollout is not None:
            own = {STABLE: rollout.stable, CANARY: rollout.candidate}
        for label in (STABLE, CANARY):
            labels.pop(label, None)
        labels.update(own)
        drained = (int(model.version) for model in self.draining)
        self.known.held = frozenset({*own.values(), *drained})

    def loaded(self) -> None:
        """See `VersionGate`."""
        found = {int(model.version): model for model in self.known.models}
        for number in found.keys() & self.record.unloadable.keys():
            del self.record.unloadable[number]
            self.dirty = True
        self._show_refusals(found)
        rollout = self.open
        if rollout is None:
            self._detach(found)
        elif not self._lacks(rollout, found, "was unloaded"):
            self._attach(rollout, found[rollout.stable], found[rollout.candidate])
        if self.plan is not None:
            self.known.labels.update(self.plan.labels)
        self.changed()

    def failed(self, error: InferenceError) -> bool:
        """See `VersionGate`: a candidate that did not load ends its rollout.

        After other failures the rollout waits for the next load.
        """
        rollout = self.open
        loaded = {int(model.version) for model in self.known.models}
        versions = error.versions if isinstance(error, LoadFailure) else ()
        if rollout is None or rollout.candidate in loaded or rollout.candidate not in versions:
            return False
        self.record.unloadable[rollout.candidate] = self.record.stamps[rollout.candidate]
        rollout.fail(error.message)
        self.changed()
        self.hold(self.record.stable)
        return not loaded

    def unloaded(self) -> None:
        """See `VersionGate`."""
        if (rollout := self.open) is not None:
            rollout.abort(SERVER, "the model was unloaded")
            self.changed()
        self.choice = self.evidence = None
        self.draining.clear()
        self.hold(0)

    # Time.

    def tick(self, now: float) -> None:
        """Judge the evidence, and pass the time since the last call; `now` is monotonic."""
        before, self._ticked = self._ticked, now
        rollout, evidence = self.open, self.evidence
        if rollout is None or self.choice is None or evidence is None:
            return
        secs = 0.0 if before is None else now - before
        self._watch(rollout, self.choice, secs)
        for breach in evidence.judge(time.perf_counter_ns()):
            rollout.breach(breach.guardrail, breach.reason)
        seen = evidence.ended[Arm.CANDIDATE] + evidence.ended[Arm.COPY]
        suspicious = bool(evidence.suspicious or evidence.unproven)
        rollout.advance(secs, seen, suspicious=suspicious, failures=evidence.failures)
        self.changed()

    def changed(self) -> None:
        """Carry out the transitions since the last call."""
        rollout = self.record.rollout
        if rollout is None:
            return
        choice = self.choice if self._attached is rollout else None
        if choice is not None:
            choice.set_shares(rollout.weight, rollout.shadow)
        new = rollout.transitions[self._known_transitions :]
        self._known_transitions = len(rollout.transitions)
        for transition in new:
            transition.time = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._noted(self, transition)
        self.dirty = self.dirty or bool(new)
        if new and not rollout.open:
            self._end(rollout, choice)
        elif choice is not None and rollout.evidence_of != self._evidence_of:
            self._observe(rollout, choice)

    def end_observation(self) -> None:
        """Keep the evidence of now, and judge no more requests."""
        self._is_over = True
        if self.evidence is not None:
            self.record.evidence = self.evidence.dump()
        self.evidence = None
        if self.choice is not None:
            self.choice.observe(None)

    # State.

    def encoded(self) -> bytes:
        """The record for the disk."""
        if self.evidence is not None:
            self.record.evidence = self.evidence.dump()
        self.dirty = False
        self.encodings += 1
        return msgspec.json.encode(self.record)

    def describe(self) -> dict[str, Any]:
        """The state as members of JSON."""
        rollout = self.record.rollout
        found: dict[str, Any] = {"model": str(self.known.id), "stable": self.record.stable or None}
        if rollout is None:
            return found
        return found | {
            **rollout.describe(),
            "stable": rollout.stable if rollout.open else self.record.stable,
            "suspicious": [] if self.evidence is None else self.evidence.suspicious,
            "guardrails": [] if self.evidence is None else self.evidence.describe(),
        }

    @property
    def history(self) -> list[Transition]:
        """All transitions that are kept, oldest first."""
        rollout = self.record.rollout
        return [*self.record.history, *([] if rollout is None else rollout.transitions)]

    # Parts.

    def _repair(self, source: LoadSource, stamps: Mapping[int, str]) -> None:
        """After a damaged record the second highest version is stable, and a person decides."""
        self.damaged = False
        available = source.available
        if len(available) > 1:
            self.begin(available[-2], available[-1], self.plan or RolloutPlan(), stamps)
            reason = "its state on disk was damaged: the second highest version is stable"
            if self.open is not None:
                self.open.set_weight(0.0, SERVER, reason)

    def _compare(self, rollout: Rollout, highest: int, stamps: Mapping[int, str]) -> None:
        """Compare an open rollout with the versions on disk."""
        plan, known = self.plan or rollout.plan, self.record.stamps
        if self._lacks(rollout, stamps, "is gone"):
            self.changed()
        elif highest > max(rollout.stable, rollout.candidate):
            rollout.supersede(f"version {highest} is newer")
            self.changed()
            self.begin(rollout.stable, highest, plan, stamps)
        elif stamps[rollout.candidate] != known[rollout.candidate]:
            rollout.supersede(f"the files of version {rollout.candidate} have changed")
            self.changed()
            self.begin(rollout.stable, rollout.candidate, plan, stamps)
        elif stamps[rollout.stable] != known[rollout.stable]:
            known[rollout.stable] = stamps[rollout.stable]
            rollout.restart_evidence(f"the files of version {rollout.stable} have changed")

    def _lacks(self, rollout: Rollout, found: Collection[int], lost: str) -> bool:
        """Whether a version is missing, which ends the rollout."""
        if rollout.candidate not in found:
            rollout.abort(SERVER, f"version {rollout.candidate} {lost}")
        elif rollout.stable not in found:
            rollout.promote(SERVER, f"version {rollout.stable} (stable) {lost}")
        return not rollout.open

    def _attach(self, rollout: Rollout, stable: Model, candidate: Model) -> None:
        present = self.choice if self._attached is rollout else None
        if present is None or (present.stable, present.candidate) != (stable, candidate):
            self._attached = rollout
            self.choice = VersionChoice(
                *(stable, candidate, self._conversations),
                *(rollout.plan.key_sources, bytes.fromhex(self.record.salt), self.draining),
            )
            stable.chooser = candidate.chooser = self.choice
            self._observe(rollout, self.choice)
        if rollout.state is RolloutState.WAITING and rollout.plan.start is PlanStart.AUTOMATIC:
            rollout.begin()

    def _observe(self, rollout: Rollout, choice: VersionChoice) -> None:
        """Observe the requests of a choice by the evidence of its rollout, or by a new one."""
        if self._is_over:
            return
        if self.evidence is None or rollout.evidence_of != self._evidence_of:
            was_on_disk, self._evidence_of = self._evidence_of < 0, rollout.evidence_of
            guardrails = rollout.plan.read_guardrails()
            made = Evidence(guardrails, rollout.plan.alpha, lambda: self._dead_on_arrival(made))
            self.evidence = made
            if was_on_disk and self.record.evidence:
                self._load_evidence(rollout, made)
        plan = rollout.plan
        shadow = Shadow(
            *(choice.stable, choice.candidate, self.evidence),
            *(self._threads, plan.shadow_in_flight),
            side_effects=plan.shadow_side_effects,
        )
        choice.observe(self.evidence, shadow if any(each.shadow for each in plan.steps) else None)
        choice.set_shares(rollout.weight, rollout.shadow)

    def _load_evidence(self, rollout: Rollout, evidence: Evidence) -> None:
        try:
            evidence.load(self.record.evidence)
        except ValueError as error:
            rollout.restart_evidence(f"the evidence on disk cannot be read: {error}")
            self._evidence_of = rollout.evidence_of

    def _dead_on_arrival(self, evidence: Evidence) -> None:
        if (rollout := self.open) is not None and evidence is self.evidence:
            rollout.dead_on_arrival(f"its first {FIRST_FAILURES} requests have failed")
            self.changed()

    def _watch(self, rollout: Rollout, choice: VersionChoice, secs: float) -> None:
        stable, candidate = choice.stable, choice.candidate
        rollout.stable_changed(able=stable.instances.ready, reason=stable.trouble)
        able = candidate.instances.ready
        rollout.candidate_changed(secs, able=able, reason=candidate.trouble)

    def _end(self, rollout: Rollout, choice: VersionChoice | None) -> None:
        """Leave the requests to one version; the other one ends once its sequences have."""
        record, promoted = self.record, rollout.state is RolloutState.PROMOTED
        stable = record.stable = rollout.candidate if promoted else rollout.stable
        record.passed_over = {n: stamp for n, stamp in self._stamps.items() if n > stable}
        self.evidence = None
        if choice is None:
            return
        if rollout.state is RolloutState.ROLLED_BACK or self._aborted_by_person(rollout):
            record.bad[rollout.candidate] = record.stamps[rollout.candidate]
        elif promoted and rollout.candidate < rollout.stable:
            record.bad[rollout.stable] = record.stamps[rollout.stable]
        choice.observe(None)
        choice.weight = ALL if promoted else 0.0
        winner, loser = choice.stable, choice.candidate
        if promoted:
            winner, loser = loser, winner
        self._conversations.move(loser, winner)
        if rollout.plan.interrupt and not promoted:
            loser.requests.abandon(_rolled_back(loser))
        self.draining.add(loser)
        self.hold(record.stable)
        self._over(self, loser)

    def _aborted_by_person(self, rollout: Rollout) -> bool:
        return rollout.state is RolloutState.ABORTED and rollout.transitions[-1].by != SERVER

    def _detach(self, found: Mapping[int, Model]) -> None:
        if self.plan is not None and found and self.record.stable not in found:
            self.record.stable, self.dirty = max(found), True
        self.hold(self.record.stable)
        if self.choice is not None and not self.draining:
            self.choice.stable.chooser = self.choice.candidate.chooser = None
            self.choice = None

    def _show_refusals(self, found: Mapping[int, Model]) -> None:
        versions = self.known.versions
        for number, reason in self._refusals.items():
            if number not in found:
                state = VersionState.UNAVAILABLE
                versions[number] = VersionStatus(state, reason, refused=True)
        self.known.versions = dict(sorted(versions.items()))

    def _keep_history(self) -> None:
        if self.record.rollout is not None:
            self.record.history = self.history[-MOST_TRANSITIONS:]
        self._known_transitions = 0


def _rolled_back(model: Model) -> InferenceError:
    text = f"version {model.version} of model '{model.name}' was rolled back"
    return InferenceError(Code.UNAVAILABLE, text)
