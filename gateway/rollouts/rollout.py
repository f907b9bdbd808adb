"""The state machine of one rollout: steps, pauses, and its end. It reads no clock."""

from enum import StrEnum
from typing import Any, NoReturn

import msgspec
from msgspec import field

from gateway.errors import Code, InferenceError
from gateway.rollouts.blocks import FIRST_FAILURES
from gateway.rollouts.plan import ALL, PlanStep, Reaction, RolloutPlan

SERVER = "server"
"""The cause of transitions by time, requests and loads."""
GUARDRAIL = "guardrail:"
"""The begin of the cause of transitions by a guardrail; its name follows."""
DEATHS = 2
"""A candidate without an able instance so often is dead on arrival."""
UNABLE_SECS = 60.0
"""So is one without an able instance for that long; restarts of instances take less."""


class RolloutState(StrEnum):
    """States of a rollout; the last four are ends."""

    WAITING = "waiting"
    STEP = "step"
    BAKING = "baking"
    PAUSED = "paused"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"


RUNNING = (RolloutState.STEP, RolloutState.BAKING)
OPEN = (RolloutState.WAITING, *RUNNING, RolloutState.PAUSED)


class Transition(msgspec.Struct, kw_only=True):
    """One change of a rollout; the owner of the clock sets `time`."""

    state: RolloutState
    step: int
    weight: float
    by: str
    reason: str
    time: str = ""


class Rollout(msgspec.Struct, kw_only=True):
    """The way of one candidate to stable, as it is on disk. All methods are synchronous.

    `by` and `reason` are those of its beginning. `weight` is the percentage of requests for the
    candidate. `spent_secs` is that of the present step. The candidate has ended `seen` requests,
    `seen_before` of them before this step. `evidence_of` counts beginnings of the evidence: it
    begins anew with each. A step that is passed and has `pause` is `passed` until it is resumed.
    `waited_secs` are those of a step since it was entered or resumed. A roll-back is `pending`,
    with its cause and reason, until stable is able.
    """

    stable: int
    candidate: int
    plan: RolloutPlan
    state: RolloutState = RolloutState.WAITING
    step: int = 0
    by: str = SERVER
    reason: str = ""
    weight: float = 0.0
    spent_secs: float = 0.0
    waited_secs: float = 0.0
    seen: int = 0
    seen_before: int = 0
    passed: bool = False
    breached: bool = False
    pending: tuple[str, str] | None = None
    deaths: int = 0
    evidence_of: int = 0
    stable_able: bool = True
    candidate_able: bool = True
    unable_secs: float = 0.0
    transitions: list[Transition] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self.state in OPEN

    @property
    def running(self) -> bool:
        """Whether its time passes."""
        return self.state in RUNNING

    @property
    def present(self) -> PlanStep:
        """The present step of the plan."""
        return self.plan.steps[self.step]

    @property
    def shadow(self) -> float:
        """The percentage of requests of which the candidate gets a copy."""
        return (self.present.shadow or 0.0) if self.running else 0.0

    @property
    def requests(self) -> int:
        """The requests that the candidate has ended in the present step."""
        return self.seen - self.seen_before

    def describe(self) -> dict[str, Any]:
        """The state as members of JSON."""
        return {
            "candidate": self.candidate,
            "state": self.state,
            "reason": self.transitions[-1].reason if self.transitions else "",
            "weight": self.weight,
            "shadow": self.shadow,
            "step": self.step + 1,
            "steps": msgspec.to_builtins(self.plan.steps),
            "spent_secs": round(self.spent_secs, 3),
            "for_secs": self.present.secs,
            "requests": self.requests,
            "min_requests": self.present.least_requests,
        }

    # Time and requests.

    def begin(self) -> None:
        """Enter the first step, once both versions are loaded."""
        self._enter_first(self.by, self.reason or f"version {self.candidate} is loaded")

    def advance(
        self, secs: float, seen: int, *, suspicious: bool = False, failures: int = 0
    ) -> None:
        """Pass `secs` of the present step.

        `suspicious` evidence and a candidate without an able instance hold it back. The candidate
        has ended `seen` requests, shadowed ones too, since the evidence began, and failed
        `failures` since its last complete one: all of them, or FIRST_FAILURES, pause it.
        """
        self.seen = seen
        if not self.running:
            return
        step = self.present
        self.spent_secs += max(0.0, secs)
        self.waited_secs += max(0.0, secs)
        if self.spent_secs < step.secs:
            return
        has_passed = self.requests >= step.least_requests and self.candidate_able
        if has_passed and failures >= min(FIRST_FAILURES, seen or 1):
            self.breached = True
            self._pause(SERVER, f"the latest {failures} requests of the candidate have failed")
        elif has_passed and not suspicious:
            self._pass(step)
        elif self.waited_secs >= self.plan.max_wait_secs:
            self._react(self.plan.on_silence, SERVER, self._lack(step))

    # Events.

    def breach(self, guardrail: str, reason: str) -> None:
        """React to a guardrail that the candidate has broken.

        One that waits, or is paused already, begins its evidence anew once it is begun or resumed.
        """
        if not self.open:
            return
        self.breached = True
        is_held = self.state is RolloutState.PAUSED and self.plan.on_breach is Reaction.PAUSE
        if self.state is not RolloutState.WAITING and not is_held:
            self._react(self.plan.on_breach, f"{GUARDRAIL}{guardrail}", reason)

    def dead_on_arrival(self, reason: str) -> None:
        """Roll back a candidate that answers nothing."""
        if self.open:
            self._roll_back("arrival", reason)

    def candidate_changed(self, secs: float, *, able: bool, reason: str = "") -> None:
        """Note whether the candidate is able, and was in the last `secs`.

        It is rolled back the second time that no instance is able, and after `UNABLE_SECS` without.
        """
        was_able, self.candidate_able = self.candidate_able, able
        if able:
            self.unable_secs = 0.0
        elif was_able:
            self.deaths += 1
        else:
            self.unable_secs += max(0.0, secs)
        if self.unable_secs >= UNABLE_SECS:
            self.dead_on_arrival(f"no instance was able for {UNABLE_SECS:.0f} s: {reason}")
        elif not able and self.deaths >= DEATHS:
            self.dead_on_arrival(f"no instance was able {DEATHS} times: {reason}")

    def stable_changed(self, *, able: bool, reason: str = "") -> None:
        """Note whether stable is able; without it the rollout pauses, and rolls back afterwards."""
        if self.running and self.stable_able and not able:
            self._pause(SERVER, f"version {self.stable} (stable) is not able: {reason}")
        self.stable_able = able
        if self.open and able and self.pending is not None:
            self._roll_back(*self.pending)

    def restart_evidence(self, reason: str) -> None:
        """Begin the present step anew, since stable's files have changed."""
        self._forget_evidence()
        self.spent_secs = self.waited_secs = 0.0
        self._note(self.state, SERVER, reason)

    def supersede(self, reason: str) -> None:
        """End the rollout, since another one replaces it."""
        self._end(RolloutState.SUPERSEDED, SERVER, reason)

    def fail(self, reason: str) -> None:
        """End it before any traffic: the candidate did not load."""
        self._end(RolloutState.ROLLED_BACK, SERVER, reason)

    # Requests of persons.

    def start(self, by: str, reason: str = "") -> None:
        """Begin a rollout that waits; INVALID_ARG in other states."""
        self._require(RolloutState.WAITING)
        self._enter_first(by, reason)

    def pause(self, by: str, reason: str = "") -> None:
        """Keep the present weight until `resume`; INVALID_ARG in other states."""
        self._require(*RUNNING)
        self._pause(by, reason)

    def resume(self, by: str, reason: str = "") -> None:
        """Continue: after a passed step with the next one; INVALID_ARG in other states.

        After a breach the evidence begins anew. After a weight that was set, the first step with
        at least that weight follows. No roll-back is pending any more, and the wait begins anew.
        """
        self._require(RolloutState.PAUSED)
        self.pending, self.waited_secs = None, 0.0
        if self.breached:
            self._forget_evidence()
        if self.passed:
            self._next(by, reason)
        elif self.weight > self.present.share:
            self._enter(self._step_of(self.weight), by, reason)
        else:
            self.weight = self.present.share
            self._note(self._state_at(self.weight), by, reason)

    def set_weight(self, weight: float, by: str, reason: str = "") -> None:
        """Set the weight and pause; INVALID_ARG for a weight that is none, and after the end."""
        self._require(*OPEN)
        if not 0 <= weight <= ALL:
            raise InferenceError(Code.INVALID_ARG, f"weight: found {weight:g}, expected 0 to 100")
        self.weight, self.passed = weight, False
        self._pause(by, reason or f"weight set to {weight:g}")

    def promote(self, by: str, reason: str = "") -> None:
        """Make the candidate stable; INVALID_ARG after the end."""
        self._require(*OPEN)
        self.weight = ALL
        self._note(RolloutState.PROMOTED, by, reason)

    def abort(self, by: str, reason: str = "") -> None:
        """Return every request to stable; INVALID_ARG after the end."""
        self._require(*OPEN)
        self._end(RolloutState.ABORTED, by, reason)

    # Transitions.

    def _require(self, *states: RolloutState) -> None:
        if self.state not in states:
            self._refuse(states)

    def _refuse(self, states: tuple[RolloutState, ...]) -> NoReturn:
        expected = ", ".join(states)
        raise InferenceError(
            Code.INVALID_ARG,
            f"the rollout of version {self.candidate} is {self.state}, expected {expected}",
        )

    def _pass(self, step: PlanStep) -> None:
        if step.pause:
            self.passed = True
            self._pause(SERVER, f"step {self.step + 1} is passed and waits for resume")
        else:
            self._next(SERVER, f"step {self.step + 1} is passed")

    def _next(self, by: str, reason: str) -> None:
        if self.step + 1 < len(self.plan.steps):
            self._enter(self.step + 1, by, reason)
        else:
            self.promote(by, reason)

    def _forget_evidence(self) -> None:
        self.evidence_of += 1
        self.seen = self.seen_before = 0
        self.breached = False

    def _enter_first(self, by: str, reason: str) -> None:
        if self.breached:
            self._forget_evidence()
        self._enter(0, by, reason)

    def _enter(self, step: int, by: str, reason: str) -> None:
        self.step, self.passed = step, False
        self.spent_secs = self.waited_secs = 0.0
        self.seen_before = self.seen
        self.weight = self.present.share
        self._note(self._state_at(self.weight), by, reason)

    def _state_at(self, weight: float) -> RolloutState:
        return RolloutState.BAKING if weight >= ALL else RolloutState.STEP

    def _step_of(self, weight: float) -> int:
        steps = enumerate(self.plan.steps)
        return next((n for n, step in steps if step.share >= weight), len(self.plan.steps) - 1)

    def _lack(self, step: PlanStep) -> str:
        missing = step.least_requests - self.requests
        if missing > 0:
            return f"step {self.step + 1} had {self.requests} of {step.least_requests} requests"
        return f"step {self.step + 1} is suspicious after {self.spent_secs:.0f} s"

    def _react(self, reaction: Reaction, by: str, reason: str) -> None:
        if reaction is Reaction.ROLL_BACK:
            self._roll_back(by, reason)
        else:
            self._pause(by, reason)

    def _roll_back(self, by: str, reason: str) -> None:
        if self.stable_able:
            self._end(RolloutState.ROLLED_BACK, by, reason)
            return
        self.pending = self.pending or (by, reason)
        if self.running:
            self._pause(by, f"{reason}; stable is not able")

    def _pause(self, by: str, reason: str) -> None:
        self._note(RolloutState.PAUSED, by, reason)

    def _end(self, state: RolloutState, by: str, reason: str) -> None:
        self.weight = 0.0
        self._note(state, by, reason)

    def _note(self, state: RolloutState, by: str, reason: str) -> None:
        self.state = state
        noted = Transition(state=state, step=self.step, weight=self.weight, by=by, reason=reason)
        self.transitions.append(noted)
