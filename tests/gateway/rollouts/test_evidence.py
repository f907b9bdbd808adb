"""Evidence: blocks, horizons, limits from stable, keys, breaches, and what is kept."""

import json
from collections.abc import Sequence
from random import Random

import pytest

from gateway.errors import Code, InferenceError
from gateway.rollouts.evidence import Evidence
from gateway.rollouts.guardrails import Guardrails, read_guardrails, read_proofs
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


def test_a_client_that_disconnects_or_sends_nonsense_is_no_event() -> None:
    traffic = Traffic(Evidence(guardrails(errors={})))
    for code in (Code.CANCELLED, Code.INVALID_ARG, Code.NOT_FOUND, Code.UNSUPPORTED):
        traffic.pairs(30, InferenceError(code, "not ours"))
    assert traffic.judge(1) == []
    assert errors_shown(traffic.evidence) == [120, 0, 120, 0]


def test_only_requests_that_are_answered_or_fail_pass_a_step() -> None:
    traffic = Traffic(Evidence(guardrails(errors={})))
    for code in (Code.CANCELLED, Code.INVALID_ARG, Code.NOT_FOUND):
        traffic.pairs(1, InferenceError(code, "not ours"))
    assert traffic.evidence.ended == [3, 0, 0]
    traffic.pairs(1, BROKEN)
    traffic.pairs(1)
    assert traffic.evidence.ended == [5, 2, 0]


def test_blocks_follow_admission_so_that_quick_errors_do_not_count_before_slow_answers() -> None:
    evidence = Evidence(guardrails(errors={}))
    traffic = Traffic(evidence)
    running = [traffic.begin(arm) for _ in range(60) for arm in (Arm.STABLE, Arm.CANDIDATE)]
    for request in running[1::20]:
        traffic.end(request, BROKEN)
    assert traffic.judge(1) == []
    assert errors_shown(evidence) == [0, 0, 0, 0]
    for request in running:
        if not request.ended_ns:
            traffic.end(request)
    traffic.judge()
    assert errors_shown(evidence) == [60, 0, 60, 6]


def test_blocks_are_judged_in_order() -> None:
    evidence = Evidence(guardrails(errors={}))
    traffic = Traffic(evidence)
    first = [traffic.begin(), *(traffic.begin(Arm.CANDIDATE) for _ in range(30))]
    for request in first[1:]:
        traffic.end(request)
    traffic.now += SEC
    traffic.pairs(60)
    traffic.judge(1)
    assert errors_shown(evidence) == [0, 0, 0, 0]
    traffic.end(first[0])
    traffic.judge()
    assert errors_shown(evidence) == [61, 0, 90, 0]


def test_a_request_that_does_not_end_holds_a_block_back_until_the_horizon() -> None:
    evidence = Evidence(guardrails(errors={}))
    traffic = Traffic(evidence)
    hanging = traffic.begin(Arm.CANDIDATE)
    traffic.pairs(49)
    traffic.judge(29)
    assert errors_shown(evidence)[2] == 0
    traffic.judge(2)
    assert errors_shown(evidence) == [49, 0, 50, 0]
    traffic.end(hanging, BROKEN)
    traffic.judge(1)
    assert errors_shown(evidence) == [49, 0, 50, 0]


def test_few_requests_make_a_longer_block() -> None:
    evidence = Evidence(guardrails(errors={}))
    traffic = Traffic(evidence)
    for _ in range(9):
        traffic.now += 60 * SEC
        traffic.pairs(1)
    traffic.judge(60)
    assert errors_shown(evidence)[0] == 0
    traffic.pairs(1)
    traffic.judge(60)
    assert errors_shown(evidence)[0] == 10


def test_a_hanging_candidate_breaches_a_limit_of_time_long_before_the_horizon() -> None:
    traffic = Traffic(Evidence(guardrails(slow_first_response={}, errors={})))
    traffic.pairs(60)
    assert traffic.judge(1) == []
    for _ in range(60):
        traffic.end(traffic.begin())
        traffic.begin(Arm.CANDIDATE)
    assert traffic.judge(1) == ["slow_first_response"]


def test_a_limit_follows_the_stable_version_as_it_is_at_admission() -> None:
    evidence = Evidence(guardrails(slow={}))
    traffic = Traffic(evidence)
    for _ in range(2):
        traffic.pairs(25)
        traffic.judge(1)
        assert errors_shown(evidence) == [0, 0, 0, 0], "stable had less than 50 requests before"
    for _ in range(3):
        for _ in range(50):  # both are ten times as slow as before, as under more load
            traffic.end(traffic.begin(), after_ms=10)
            traffic.end(traffic.begin(Arm.CANDIDATE), after_ms=10)
        traffic.judge(1)
    assert errors_shown(evidence) == [150, 50, 150, 50]


def test_an_absolute_guardrail_works_while_stable_gets_no_requests() -> None:
    traffic = Traffic(Evidence(guardrails(errors={"max": 0.01}, empty={})))
    for _ in range(60):
        traffic.end(traffic.begin(Arm.CANDIDATE), BROKEN)
    assert traffic.judge(1) == ["errors"]


def test_copies_have_no_limits_of_time() -> None:
    evidence = Evidence(guardrails(slow={"ms": 1}, errors={}))
    traffic = Traffic(evidence)
    for _ in range(60):
        traffic.end(traffic.begin(), after_ms=0)
        traffic.end(traffic.begin(Arm.COPY), BROKEN, after_ms=500)
    assert traffic.judge(1) == ["errors"]
    assert errors_shown(evidence, at=0) == [60, 0, 0, 0]
    assert errors_shown(evidence, at=1) == [60, 0, 60, 60]


def test_a_client_that_repeats_a_broken_prompt_is_no_alarm() -> None:
    evidence = Evidence(guardrails(errors={}))
    traffic = Traffic(evidence)
    for number in range(2000):
        error = BROKEN if number % 100 == 50 else None
        traffic.end(traffic.begin(key=b"%d" % number), error)
        traffic.end(traffic.begin(Arm.CANDIDATE, b"%d" % (number + 30)), error)
        traffic.end(traffic.begin(Arm.CANDIDATE, b"broken"), BROKEN)
        assert traffic.judge() == []
    _, _, requests, events = errors_shown(evidence)
    assert requests > 3900
    assert events <= 20 * 1.25 + 1, "one key has a fifth of the events"


def test_a_repeated_prompt_has_its_share_among_more_keys_than_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.rollouts.blocks.MOST_KEYS", 20)
    traffic = Traffic(Evidence(guardrails(errors={})))
    for number in range(1000):
        traffic.end(traffic.begin(Arm.CANDIDATE, b"%d" % number), BROKEN)
        traffic.end(traffic.begin(Arm.CANDIDATE, b"broken"), BROKEN)
    traffic.judge(1)
    assert errors_shown(traffic.evidence)[3] <= 1000 * 1.25 + 1


class Hashed(bytes):
    """A key that counts the look-ups of all keys."""

    count = 0

    def __hash__(self) -> int:
        Hashed.count += 1
        return super().__hash__()


def test_events_of_any_number_of_keys_take_equal_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.rollouts.blocks.MOST_KEYS", 100)
    traffic = Traffic(Evidence(guardrails(errors={})))
    keys = [Hashed(b"%d" % number) for number in range(500)]
    for key in keys * 2:
        for _ in range(2):
            traffic.end(traffic.begin(Arm.CANDIDATE, key), BROKEN)
    Hashed.count = 0
    traffic.judge(1)
    assert 1900 < errors_shown(traffic.evidence)[3] <= 2000
    assert Hashed.count < 5 * 2000


@pytest.mark.parametrize("keys", [1, 2])
def test_failures_of_few_keys_are_known_until_a_request_is_complete(keys: int) -> None:
    traffic = Traffic(Evidence(guardrails(errors={})))
    for number in range(100):
        traffic.end(traffic.begin())
        arm = Arm.COPY if number % 10 == 0 else Arm.CANDIDATE
        traffic.end(traffic.begin(arm, b"%d" % (number % keys)), BROKEN)
    assert traffic.judge(1) == []
    assert traffic.evidence.failures == 100
    again = Evidence(guardrails(errors={}))
    again.load(json.loads(json.dumps(traffic.evidence.dump())))
    assert again.failures == 100
    traffic.end(traffic.begin(Arm.CANDIDATE), InferenceError(Code.INVALID_ARG, "not ours"))
    assert traffic.evidence.failures == 100
    traffic.end(traffic.begin(Arm.CANDIDATE))
    assert traffic.evidence.failures == 0


def test_events_of_stable_count_for_any_key() -> None:
    evidence = Evidence(guardrails(errors={}))
    traffic = Traffic(evidence)
    for _ in range(60):
        traffic.end(traffic.begin(key=b"one"), BROKEN)
        traffic.end(traffic.begin(Arm.CANDIDATE, key=b"two"), BROKEN)
    traffic.judge(1)
    assert errors_shown(evidence) == [60, 60, 60, 1]


@pytest.mark.parametrize(
    ("keys", "calls"), [([b""] * 5, 1), ([b"a", b"b", b"c", b"d", b"e"], 1), ([b"a"] * 50, 0)]
)
def test_a_candidate_whose_first_requests_fail_is_dead_on_arrival(
    keys: list[bytes], calls: int
) -> None:
    called: list[None] = []
    traffic = Traffic(Evidence(guardrails(), 0.01, lambda: called.append(None)))
    traffic.end(traffic.begin(Arm.STABLE), BROKEN)
    for key in keys:
        traffic.end(traffic.begin(Arm.CANDIDATE, key), BROKEN)
    traffic.end(traffic.begin(Arm.CANDIDATE, b"z"), BROKEN)
    traffic.end(traffic.begin(Arm.CANDIDATE, keys[0]), BROKEN)
    assert len(called) == calls


def test_a_candidate_that_has_answered_once_is_not_dead_on_arrival() -> None:
    called: list[None] = []
    traffic = Traffic(Evidence(guardrails(), 0.01, lambda: called.append(None)))
    traffic.pairs(4, BROKEN)
    traffic.pairs(1)
    traffic.pairs(9, BROKEN)
    assert called == []


def test_a_refused_request_counts_as_an_error() -> None:
    evidence = Evidence(guardrails(errors={}))
    for _ in range(60):
        evidence.refuse(InferenceError(Code.UNAVAILABLE, "full"), Arm.CANDIDATE, b"", SEC)
        evidence.refuse(InferenceError(Code.INVALID_ARG, "no"), Arm.STABLE, b"", SEC)
    assert [each.guardrail for each in evidence.judge(3 * SEC)] == ["errors"]
    assert errors_shown(evidence) == [60, 0, 60, 60]


def test_a_golden_request_breaches_at_its_second_failure_in_a_row() -> None:
    evidence = Evidence(guardrails(golden={}))
    assert [evidence.golden(text) for text in ("a", "", "b")] == [None, None, None]
    breach = evidence.golden("text is 'c'")
    assert breach is not None
    assert (breach.guardrail, breach.reason) == ("golden", "text is 'c'")
    assert evidence.golden("again") is None


def test_many_requests_are_sampled() -> None:
    evidence = Evidence(guardrails(errors={}))
    observed = 0
    for number in range(20_000):  # 10,000 requests a second
        request = evidence.tap(Arm.STABLE)
        if request is not None:
            observed += number >= 10_000
            request.admitted_ns = request.received_ns = SEC + number * MS // 10
            evidence.admit(request)
            request.ended_ns = request.received_ns
            request.finish(None)
    assert 240 <= observed <= 260


def test_a_step_is_suspicious_at_half_of_the_evidence_and_a_proof_needs_many_requests() -> None:
    read = read_proofs({"errors": 2.0}, "prove", guardrails(errors={}))
    evidence = Evidence(read, random=Random(1))
    traffic = Traffic(evidence)
    for number in range(50):
        error = BROKEN if number % 10 == 0 else None
        traffic.end(traffic.begin(), error)
        traffic.end(traffic.begin(Arm.CANDIDATE), error)
    traffic.judge(1)
    for number in range(50):
        traffic.end(traffic.begin(), BROKEN if number % 10 == 0 else None)
        traffic.end(traffic.begin(Arm.CANDIDATE), BROKEN if number % 25 < 12 else None)
    assert traffic.judge(1) == []
    assert (evidence.suspicious, evidence.unproven) == (["errors"], ["errors"])
    for number in range(3000):
        traffic.end(traffic.begin(), BROKEN if number % 5 == 0 else None)
        traffic.end(traffic.begin(Arm.CANDIDATE), BROKEN if number % 50 == 0 else None)
        traffic.judge()
    traffic.judge(1)
    assert (evidence.suspicious, evidence.unproven) == ([], [])


def test_the_reason_of_a_breach_has_its_numbers() -> None:
    traffic = Traffic(Evidence(guardrails(errors={})))
    traffic.pairs(60, BROKEN)
    traffic.now += SEC
    (breach,) = traffic.evidence.judge(traffic.now)
    assert breach.reason.startswith(
        "errors: 60 of 60 requests (100.00%) of the candidate, 0 of 60 requests (0.00%) of stable; "
        "evidence 10^"
    )
    (shown,) = traffic.evidence.describe()
    assert shown["evidence"] > shown["limit"] == 2
    assert shown["p"] < 0.01
    assert shown["breached"]
    json.dumps(shown)


def test_the_evidence_survives_a_restart() -> None:
    traffic = Traffic(Evidence(guardrails(errors={}, golden={})))
    traffic.pairs(60, BROKEN)
    assert traffic.judge(1) == ["errors"]
    state = json.loads(json.dumps(traffic.evidence.dump()))
    again = Evidence(guardrails(errors={}, golden={}))
    again.load(state)
    assert again.describe() == traffic.evidence.describe()
    assert again.judge(traffic.now) == []
    assert again.ended == traffic.evidence.ended


@pytest.mark.parametrize("damage", [{"tests": {}}, {"ended": None}, {"breached": 3}], ids=str)
def test_a_damaged_state_is_refused(damage: dict[str, object]) -> None:
    evidence = Evidence(guardrails(errors={}))
    with pytest.raises(ValueError, match="the state of the evidence is not complete"):
        evidence.load({**evidence.dump(), **damage})
