"""The share of many requests that is observed."""

from gateway.rollouts.evidence import Evidence
from gateway.rollouts.guardrails import read_guardrails
from gateway.rollouts.observation import Arm, Observation

MS, SEC = 1_000_000, 1_000_000_000


def evidence_of_errors() -> Evidence:
    return Evidence(read_guardrails({"errors": {}}, "guardrails"))


def complete(evidence: Evidence, request: Observation | None, now: int) -> bool:
    """Admit and end a request, if it is observed; returns whether it is."""
    if request is None:
        return False
    request.admitted_ns = request.received_ns = now
    evidence.admit(request)
    request.first_ns = request.last_ns = request.ended_ns = now
    request.finish(None)
    return True


def test_a_surge_is_sampled_within_its_first_second() -> None:
    evidence, now, observed = evidence_of_errors(), SEC, 0
    for _ in range(300):  # 100 requests a second
        now += 10 * MS
        assert complete(evidence, evidence.tap(Arm.STABLE), now)
    for _ in range(10_000):  # 10,000 requests a second
        now += MS // 10
        observed += complete(evidence, evidence.tap(Arm.STABLE), now)
    assert 500 <= observed <= 3500
    evidence.judge(now + 2 * SEC)
    assert evidence.describe()[0]["stable"]["requests"] == 300 + observed


def test_seconds_after_a_burst_every_request_is_observed_again() -> None:
    evidence, now = evidence_of_errors(), SEC
    for _ in range(600):
        now += MS // 10
        assert complete(evidence, evidence.tap(Arm.STABLE), now)
    observed = []
    for _ in range(400):  # 100 requests a second
        now += 10 * MS
        observed.append(complete(evidence, evidence.tap(Arm.STABLE), now))
    assert all(observed[-100:])


def test_requests_that_are_all_observed_make_others_no_rarer() -> None:
    """Those with copies are: a step with a weight may follow one with copies."""
    evidence, now = evidence_of_errors(), SEC
    for _ in range(20_000):  # 1,000 requests a second
        now += MS
        complete(evidence, Observation(evidence, Arm.STABLE), now)
    found = sum(complete(evidence, evidence.tap(Arm.STABLE), now) for _ in range(1000))
    assert found >= 200
