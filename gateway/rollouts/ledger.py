"""The record of one model's rollouts: their beginnings, transitions and history."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.errors import Code, InferenceError
from gateway.rollouts.evidence import GuardrailTests
from gateway.rollouts.plan import RolloutPlan
from gateway.rollouts.rollout import SERVER, Rollout, RolloutState, Transition
from gateway.rollouts.state import MOST_TRANSITIONS, RolloutRecord


class RolloutLedger(ABC):
    """The rollouts of one model, all synchronous.

    `noted` is called with each transition. A `dirty` record is not kept yet.
    """

    evidence: GuardrailTests | None

    def __init__(self, record: RolloutRecord, noted: Callable[[Transition], None]) -> None:
        self.record = record
        self.evidence = None
        self.plan: RolloutPlan | None = None
        self.dirty = False
        self.encodings = 0
        self._noted = noted
        rollout = record.rollout
        self._known_transitions = 0 if rollout is None else len(rollout.transitions)

    @property
    def open(self) -> Rollout | None:
        """The open rollout."""
        found = self.record.rollout
        return found if found is not None and found.open else None

    @property
    def history(self) -> list[Transition]:
        """All transitions that are kept, oldest first."""
        rollout = self.record.rollout
        return [*self.record.history, *([] if rollout is None else rollout.transitions)]

    def require_none_open(self) -> None:
        """Raise ALREADY_EXISTS while a rollout is open."""
        if (rollout := self.open) is not None:
            about = f"a rollout of version {rollout.candidate} ({rollout.state})"
            text = f"model '{self.record.model}' has {about}; promote or abort it first"
            raise InferenceError(Code.ALREADY_EXISTS, text)

    def begin(
        self, stable: int, candidate: int, plan: RolloutPlan, stamps: Mapping[int, str]
    ) -> Rollout:
        """Have a new rollout, which waits until both versions are loaded."""
        if self.record.rollout is not None:
            self.record.history = self.history[-MOST_TRANSITIONS:]
        self._known_transitions = 0
        made = self.record.rollout = Rollout(stable=stable, candidate=candidate, plan=plan)
        self.record.salt = secrets.token_hex(8)
        self.record.stamps = {each: stamps.get(each, "") for each in (stable, candidate)}
        self.record.evidence = {}
        self.evidence = None
        self.dirty = True
        return made

    @abstractmethod
    def changed(self) -> None:
        """Carry out the transitions since the last call."""

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
        found: dict[str, Any] = {"model": self.record.model, "stable": self.record.stable or None}
        if rollout is None:
            return found
        return found | {
            **rollout.describe(),
            "stable": rollout.stable if rollout.open else self.record.stable,
            "suspicious": [] if self.evidence is None else self.evidence.suspicious,
            "guardrails": [] if self.evidence is None else self.evidence.describe(),
        }

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

    def _note(self, rollout: Rollout) -> bool:
        """Note the transitions since the last call; whether there are some."""
        new = rollout.transitions[self._known_transitions :]
        self._known_transitions = len(rollout.transitions)
        for transition in new:
            transition.time = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._noted(transition)
        self.dirty = self.dirty or bool(new)
        return bool(new)

    def _settle(self, rollout: Rollout, stamps: Mapping[int, str]) -> None:
        """Keep the version that has won, and pass over those above it."""
        promoted = rollout.state is RolloutState.PROMOTED
        stable = self.record.stable = rollout.candidate if promoted else rollout.stable
        self.record.passed_over = {n: stamp for n, stamp in stamps.items() if n > stable}
        self.evidence = None

    def _refuse_loser(self, rollout: Rollout) -> None:
        """Refuse a version that was rolled back until its files change."""
        record, promoted = self.record, rollout.state is RolloutState.PROMOTED
        by_person = rollout.state is RolloutState.ABORTED and rollout.transitions[-1].by != SERVER
        if rollout.state is RolloutState.ROLLED_BACK or by_person:
            record.bad[rollout.candidate] = record.stamps[rollout.candidate]
        elif promoted and rollout.candidate < rollout.stable:
            record.bad[rollout.stable] = record.stamps[rollout.stable]
