"""The rollouts of one model: what its loads may load, and its open rollout."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from gateway.conversations.conversations import Conversations
from gateway.errors import Code, InferenceError
from gateway.models.ensemble_members import LoadFailure
from gateway.models.labels import CANARY
from gateway.models.model import Model
from gateway.models.model_folder import Snapshot
from gateway.models.registry import STABLE, KnownModel, VersionState, VersionStatus
from gateway.models.repository import LoadSource
from gateway.rollouts.blocks import FIRST_FAILURES
from gateway.rollouts.changes import RolloutBeginning
from gateway.rollouts.choice import VersionChoice
from gateway.rollouts.evidence import Evidence
from gateway.rollouts.ledger import RolloutLedger
from gateway.rollouts.observation import Arm
from gateway.rollouts.plan import ALL, PlanStart, RolloutPlan
from gateway.rollouts.rollout import SERVER, Rollout, RolloutState, Transition
from gateway.rollouts.shadow import Shadow
from gateway.rollouts.state import RolloutRecord, digest
from gateway.threads import Threads

log = logging.getLogger("sluice.rollouts")


class PlanFile(NamedTuple):
    """The plan of a model, None without a file, and the reason why none may begin by itself."""

    plan: RolloutPlan | None = None
    refusal: str = ""


class ModelRollouts(RolloutLedger):
    """The rollouts of one model on this server.

    `over` is called with the version that no new request gets after the end of a rollout. An
    `unreadable` record stays on disk.
    """

    evidence: Evidence | None

    def __init__(
        self,
        known: KnownModel,
        record: RolloutRecord,
        conversations: Conversations,
        threads: Threads,
        noted: Callable[["ModelRollouts", Transition], None],
        over: Callable[["ModelRollouts", Model], None],
    ) -> None:
        super().__init__(record, lambda change: noted(self, change))
        self.known = known
        self.choice: VersionChoice | None = None
        self.damaged, self.unreadable = False, ""
        self.draining: set[Model] = set()
        self._conversations = conversations
        self._threads = threads
        self._over = over
        self._refusals: dict[int, str] = {}
        self._ticked: float | None = None
        self._attached: Rollout | None = None
        self._evidence_of = -1
        self._stamps: Mapping[int, str] = {}
        self._is_over = False
        self._labelled: KnownModel | None = None

    # Loads.

    def admit(self, source: LoadSource, found: PlanFile) -> LoadSource:
        """The source of a load without versions that were rolled back; see `VersionGate`.

        A new highest version begins a rollout, and with it both versions are held.
        """
        self.plan = found.plan
        if source.upload is None:  # the model of a client's files has other versions
            self._restore_labels(source.entry.available + tuple(source.entry.left_out))
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
        """See `RolloutLedger`."""
        self._evidence_of, self._ticked = -1, None
        return super().begin(stable, candidate, plan, stamps)

    def stable_of(self, source: LoadSource) -> int:
        """The version that answers requests without a version; 0 if none has."""
        rollout, available = self.open, source.available
        if rollout is not None:
            return rollout.stable
        if self.record.stable in available:
            return self.record.stable
        loaded = self.known.loaded.intersection(available) - self._refusals.keys()
        # A candidate that was aborted may not have been unloaded yet.
        return max(loaded & source.selected or loaded, default=0)

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

    # Starts.

    @property
    def source(self) -> LoadSource:
        """The source of the last load; UNAVAILABLE if the model is not loaded."""
        if (source := self.known.source) is None:
            raise InferenceError(Code.UNAVAILABLE, f"model '{self.known.id.name}' is not loaded")
        return source

    def require_loaded(self, rollout: Rollout) -> None:
        """Raise UNAVAILABLE while the versions of an open rollout are being loaded."""
        if rollout.open and self._attached is not rollout:
            text = f"the versions of '{self.known.id.name}' are being loaded"
            raise InferenceError(Code.UNAVAILABLE, text)

    def require_startable(self, wanted: RolloutBeginning) -> int:
        """The version that is stable in a rollout of the wanted one; raises InferenceError."""
        self.require_none_open()
        name, version = self.known.id.name, wanted.version
        stable = self.stable_of(self.source)
        if version == stable:
            text = f"version {version} of model '{name}' is stable already"
            raise InferenceError(Code.INVALID_ARG, text)
        if version in self.record.bad and not wanted.again:
            text = f"version {version} of model '{name}' was rolled back, and has the same files"
            raise InferenceError(Code.INVALID_ARG, f"{text}; start it again with 'again' (--again)")
        return stable

    @contextmanager
    def starting(
        self,
        wanted: RolloutBeginning,
        by: str,
        plan: RolloutPlan,
        snapshot: Snapshot,
        *,
        overridden: bool,
    ) -> Iterator[None]:
        """A rollout that begins with the block, the load of its versions; one that fails ends it.

        The block is entered while no other load of the model is under way: one that was admitted
        before would unload the candidate. `overridden`: the load keeps a client's config.
        """
        stable = self.require_startable(wanted)
        if self.source.overridden is not overridden:
            text = f"model '{self.known.id.name}' was loaded meanwhile; start the rollout again"
            raise InferenceError(Code.UNAVAILABLE, text)
        refused = self.record.bad.pop(wanted.version, "")
        self.record.unloadable.pop(wanted.version, None)
        stamps = {each: digest(snapshot, each) for each in (stable, wanted.version)}
        begun = self.begin(stable, wanted.version, plan, stamps)
        begun.by, begun.reason = by, wanted.reason
        try:
            yield
        except BaseException as error:
            if (left := self.open) is not None and left is not self._attached:
                left.abort(SERVER, getattr(error, "message", "its load was interrupted"))
                self.record.bad |= {wanted.version: refused} if refused else {}
                self.changed()
                self.hold(self.record.stable)
            raise

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
        """See `RolloutLedger`."""
        rollout = self.record.rollout
        if rollout is None:
            return
        choice = self.choice if self._attached is rollout else None
        if choice is not None:
            choice.set_shares(rollout.weight, rollout.shadow)
        if self._note(rollout) and not rollout.open:
            self._end(rollout, choice)
        elif choice is not None and rollout.evidence_of != self._evidence_of:
            self._observe(rollout, choice)

    def keep_labels(self, changes: Mapping[str, int | None]) -> None:
        """Keep labels that a client has set; None removes one."""
        kept = {**self.record.labels, **changes}
        self.record.labels = {label: number for label, number in kept.items() if number is not None}
        self.dirty = True

    def end_observation(self) -> None:
        """Keep the evidence of now, and judge no more requests."""
        self._is_over = True
        if self.evidence is not None:
            self.record.evidence = self.evidence.dump()
        self.evidence = None
        if self.choice is not None:
            self.choice.observe(None)

    # Parts.

    def _restore_labels(self, available: Collection[int]) -> None:
        """Set the labels on disk at the first load; drop those of versions that are gone."""
        if self._labelled is self.known:
            return
        self._labelled = self.known
        for label, number in tuple(self.record.labels.items()):
            if number in available:
                self.known.labels[label] = number
            else:
                del self.record.labels[label]
                self.dirty = True
                about = {"model": self.record.model, "label": label, "version": number}
                log.warning("label dropped, its version is gone", extra=about)

    def _repair(self, source: LoadSource, stamps: Mapping[int, str]) -> None:
        """After a damaged record the second highest version is stable, and a person decides."""
        self.damaged = False
        available = source.available
        if len(available) > 1:
            self.begin(available[-2], available[-1], self.plan or RolloutPlan(), stamps)
            reason = "its state on disk was damaged: the second highest version is stable"
            if self.open is not None:
                self.open.set_weight(0.0, SERVER, reason)

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
        self._settle(rollout, self._stamps)
        if choice is None:
            return
        self._refuse_loser(rollout)
        promoted = rollout.state is RolloutState.PROMOTED
        choice.observe(None)
        choice.weight = ALL if promoted else 0.0
        winner, loser = choice.stable, choice.candidate
        if promoted:
            winner, loser = loser, winner
        self._conversations.move(loser, winner)
        if rollout.plan.interrupt and not promoted:
            loser.requests.abandon(_rolled_back(loser))
        self.draining.add(loser)
        self.hold(self.record.stable)
        self._over(self, loser)

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


def _rolled_back(model: Model) -> InferenceError:
    text = f"version {model.version} of model '{model.name}' was rolled back"
    return InferenceError(Code.UNAVAILABLE, text)
