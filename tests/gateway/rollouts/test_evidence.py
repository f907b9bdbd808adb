"""Evidence: blocks, horizons, limits from stable, keys, breaches, and what is kept."""

from collections.abc import Sequence

from gateway.errors import Code, InferenceError
from gateway.rollouts.evidence import Evidence
from gateway.rollouts.guardrails import Guardrails, read_guardrails
from gateway.rollouts.observation import Arm, Observation

MS, SEC = 1_000_000, 1_000_000_000
BROKEN = InferenceError(Code.INTERNAL, "broken")


def guardrails(**given: object) -> Guardrails:
    return read_guardrails(given, "guardrails")


class Traffic:
    """Requests of both arms on a clock of its own, 10 ms apart."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.now = SEC

    def begin(self, arm: Arm = Arm.STABLE, key: bytes = b"") -> Observation:
        self.now += 10 * MS
        request = self.evidence.tap(arm, key)
        assert request is not None
        request.admitted_ns = request.received_ns = self.now
        self.evidence.admit(request)
        return request

    def end(
        self, request: Observation, error: InferenceError | None = None, after_ms: int = 1
    ) -> None:
        request.ended_ns = request.last_ns = request.received_ns + after_ms * MS
        request.first_ns = request.first_ns or request.ended_ns
        request.finish(error)

    def pairs(self, count: int, error: InferenceError | None = None, after_ms: int = 1) -> None:
        """Requests to both in turn; the candidate's have that result."""
        for _ in range(count):
            self.end(self.begin())
            self.end(self.begin(Arm.CANDIDATE), error, after_ms)

    def judge(self, after_secs: float = 0) -> list[str]:
        self.now += int(after_secs * SEC)
        return [each.guardrail for each in self.evidence.judge(self.now)]


def errors_shown(evidence: Evidence, at: int = 0) -> Sequence[float]:
    """Requests and events of stable, then of the candidate."""
    shown = evidence.describe()[at]
    return [shown[arm][what] for arm in ("stable", "candidate") for what in ("requests", "events")]


def test_a_candidate_that_always_fails_breaches_once() -> None:
    traffic = Traffic(Evidence(guardrails(errors={})))
    traffic.pairs(60, BROKEN)
    assert traffic.judge(1) == ["errors"]
    traffic.pairs(60, BROKEN)
    assert traffic.judge(1) == []


def test_two_events_are_no_breach_even_with_enough_evidence() -> None:
    traffic = Traffic(Evidence(guardrails(errors={}), alpha=0.5))
    for _ in range(5000):
        traffic.end(traffic.begin())
    traffic.judge(1)
    for _ in range(2):
        traffic.end(traffic.begin(Arm.CANDIDATE), BROKEN)
    traffic.pairs(10)
    assert traffic.judge(1) == []
    assert traffic.evidence.describe()[0]["evidence"] > traffic.evidence.describe()[0]["limit"]
    traffic.end(traffic.begin(Arm.CANDIDATE), BROKEN)
    traffic.pairs(50)
    assert traffic.judge(1) == ["errors"]
