"""The state machine of a rollout: every transition, without a server or a clock."""

from collections.abc import Callable

import msgspec
import pytest

from gateway.errors import InferenceError
from gateway.rollouts.plan import PlanStep, Reaction
from gateway.rollouts.rollout import Rollout, RolloutState
from tests.gateway.rollouts.steps import (
    ABORTED,
    BAKING,
    PAUSED,
    PROMOTED,
    ROLLED_BACK,
    STEP,
    WAITING,
    breaches,
    dies,
    last,
    pass_time,
    place,
    rollout,
)


def test_a_candidate_that_waits_gets_nothing() -> None:
    found = rollout(begun=False)
    pass_time(found, 1e6)
    assert place(found) == (WAITING, 0, 0)


def test_steps_pass_by_time_and_requests_until_the_promotion() -> None:
    found = rollout()
    seen = []
    for secs in (600, 600, 1800):
        seen.append(place(found))
        pass_time(found, secs, 3)
    assert seen == [(STEP, 0, 10), (STEP, 1, 50), (BAKING, 2, 100)]
    assert place(found) == (PROMOTED, 2, 100)
    assert not found.open
    states = [(each.state, each.weight) for each in found.transitions]
    assert states == [(STEP, 10), (STEP, 50), (BAKING, 100), (PROMOTED, 100)]


@pytest.mark.parametrize(("secs", "requests"), [(599, 3), (600, 2)])
def test_a_step_needs_its_time_and_its_requests(secs: float, requests: int) -> None:
    found = rollout()
    pass_time(found, secs, requests)
    assert place(found) == (STEP, 0, 10)


def test_time_and_requests_of_one_step_do_not_count_for_the_next() -> None:
    found = rollout()
    pass_time(found, 5000, 50)
    pass_time(found, 599)
    assert (found.step, found.requests) == (1, 0)


def test_a_clock_that_is_set_back_takes_no_time_away() -> None:
    found = rollout()
    pass_time(found, 599, 3)
    pass_time(found, -1000)
    pass_time(found, 1)
    assert found.step == 1


def test_suspicious_evidence_holds_a_step_back_until_it_is_gone() -> None:
    found = rollout()
    pass_time(found, 700, 3, suspicious=True)
    assert found.step == 0
    pass_time(found, 0)
    assert found.step == 1


@pytest.mark.parametrize(("requests", "failures"), [(3, 3), (50, 5), (1000, 6)])
def test_a_candidate_whose_latest_requests_have_failed_passes_no_step(
    requests: int, failures: int
) -> None:
    found = rollout()
    found.advance(599, requests, failures=failures)
    assert place(found) == (STEP, 0, 10)
    found.advance(1, requests, failures=failures)
    assert place(found) == (PAUSED, 0, 10)
    assert last(found) == (
        "server",
        f"the latest {failures} requests of the candidate have failed",
    )
    found.resume("cli")
    assert (place(found), found.requests, found.evidence_of) == ((STEP, 0, 10), 0, 1)
    found.advance(1, 3)
    assert found.step == 1


@pytest.mark.parametrize(("requests", "failures"), [(3, 2), (50, 4)])
def test_a_candidate_that_has_answered_lately_passes_its_step(requests: int, failures: int) -> None:
    found = rollout()
    found.advance(600, requests, failures=failures)
    assert place(found) == (STEP, 1, 50)


@pytest.mark.parametrize(
    ("reaction", "state"), [(Reaction.PAUSE, PAUSED), (Reaction.ROLL_BACK, ROLLED_BACK)]
)
def test_silence_never_promotes(reaction: Reaction, state: RolloutState) -> None:
    found = rollout(on_silence=reaction)
    pass_time(found, 24 * 3600 - 1)
    assert found.state is STEP
    pass_time(found, 1)
    assert found.state is state
    assert last(found) == ("server", "step 1 had 0 of 3 requests")


def test_the_longest_wait_begins_anew_with_a_resume() -> None:
    found = rollout(max_wait="1h")
    pass_time(found, 3601)
    found.resume("cli")
    pass_time(found, 3599)
    assert place(found) == (STEP, 0, 10)
    pass_time(found, 1)
    assert place(found) == (PAUSED, 0, 10)
    found.resume("cli")
    pass_time(found, 1, 3)
    assert place(found) == (STEP, 1, 50)
    pass_time(found, 3599)
    assert place(found) == (STEP, 1, 50)


def test_a_step_that_stays_suspicious_for_the_longest_wait_pauses() -> None:
    found = rollout(max_wait="1h")
    pass_time(found, 3600, 3, suspicious=True)
    assert place(found) == (PAUSED, 0, 10)
    assert last(found)[1] == "step 1 is suspicious after 3600 s"


def test_a_step_longer_than_the_longest_wait_has_its_whole_time() -> None:
    found = rollout(PlanStep(weight=100, lasts="48h", min_requests=0), max_wait="1h")
    pass_time(found, 40 * 3600)
    assert found.state is BAKING


def test_a_step_that_pauses_waits_for_a_person() -> None:
    found = rollout(PlanStep(weight=50, min_requests=0, pause=True), PlanStep(weight=100))
    pass_time(found, 1)
    assert place(found) == (PAUSED, 0, 50)
    pass_time(found, 1e9)
    found.resume("api:10.0.0.7", "looks good")
    assert place(found) == (BAKING, 1, 100)
    assert last(found) == ("api:10.0.0.7", "looks good")


def test_an_ab_test_ends_with_the_resume_of_its_only_step() -> None:
    found = rollout(PlanStep(weight=50, min_requests=0, pause=True))
    pass_time(found, 0)
    found.resume("cli")
    assert place(found) == (PROMOTED, 0, 100)


def test_a_paused_rollout_keeps_its_weight_and_its_time() -> None:
    found = rollout()
    pass_time(found, 500, 3)
    found.pause("cli", "lunch")
    pass_time(found, 5000)
    assert place(found) == (PAUSED, 0, 10)
    found.resume("cli")
    assert (place(found), found.spent_secs) == ((STEP, 0, 10), 500)
    pass_time(found, 100)
    assert found.step == 1


@pytest.mark.parametrize(
    ("weight", "step"), [(25, (STEP, 1, 50)), (5, (STEP, 0, 10)), (100, (BAKING, 2, 100))]
)
def test_a_weight_that_is_set_holds_until_the_resume(
    weight: float, step: tuple[str, int, float]
) -> None:
    found = rollout()
    found.set_weight(weight, "cli")
    assert place(found) == (PAUSED, 0, weight)
    found.resume("cli")
    assert place(found) == step


@pytest.mark.parametrize("weight", [-1, 100.5, float("nan")])
def test_a_weight_that_is_none_changes_nothing(weight: float) -> None:
    found = rollout()
    with pytest.raises(InferenceError, match=r"weight: found .*, expected 0 to 100"):
        found.set_weight(weight, "cli")
    assert place(found) == (STEP, 0, 10)


@pytest.mark.parametrize(
    ("reaction", "end"), [(Reaction.ROLL_BACK, (ROLLED_BACK, 0)), (Reaction.PAUSE, (PAUSED, 10))]
)
def test_a_breach_rolls_back_or_freezes(
    reaction: Reaction, end: tuple[RolloutState, float]
) -> None:
    found = rollout(on_breach=reaction)
    found.breach("errors", "5 of 9 requests failed")
    assert (found.state, found.weight) == end
    assert last(found) == ("guardrail:errors", "5 of 9 requests failed")


def test_a_frozen_rollout_notes_a_breach_once_and_resumes_with_new_evidence() -> None:
    found = rollout(on_breach=Reaction.PAUSE)
    found.breach("errors", "first")
    found.breach("errors", "second")
    assert last(found)[1] == "first"
    found.resume("cli")
    assert (found.state, found.evidence_of) == (STEP, 1)


def test_a_breach_while_a_person_has_paused_still_rolls_back() -> None:
    found = rollout()
    found.pause("cli")
    found.breach("errors", "bad")
    assert place(found) == (ROLLED_BACK, 0, 0)


def test_a_candidate_that_answers_nothing_is_rolled_back_at_once() -> None:
    found = rollout(on_breach=Reaction.PAUSE)
    found.dead_on_arrival("its first 5 requests failed")
    assert found.state is ROLLED_BACK
    assert last(found) == ("arrival", "its first 5 requests failed")


def test_a_candidate_without_instances_twice_is_dead_on_arrival() -> None:
    found = rollout()
    found.candidate_changed(1, able=False, reason="crashed")
    found.candidate_changed(1, able=False, reason="crashed")
    found.candidate_changed(1, able=True)
    assert found.state is STEP
    found.candidate_changed(1, able=False, reason="crashed")
    assert (found.state, found.weight) == (ROLLED_BACK, 0)
    assert last(found) == ("arrival", "no instance was able 2 times: crashed")


def test_a_candidate_that_stays_without_instances_passes_no_step_and_is_rolled_back() -> None:
    found = rollout()
    found.candidate_changed(1, able=False, reason="crashed")
    pass_time(found, 700, 3)
    found.candidate_changed(59, able=False, reason="crashed")
    pass_time(found, 59, 3)
    assert (found.state, found.step) == (STEP, 0)
    found.candidate_changed(1, able=False, reason="crashed")
    assert found.state is ROLLED_BACK
    assert last(found) == ("arrival", "no instance was able for 60 s: crashed")


@pytest.mark.parametrize("fails", [dies, breaches])
def test_a_rollout_pauses_when_stable_dies_and_never_rolls_back_to_it(
    fails: Callable[[Rollout], None],
) -> None:
    found = rollout()
    found.stable_changed(able=False, reason="engine died")
    assert place(found) == (PAUSED, 0, 10)
    assert last(found)[1] == "version 3 (stable) is not able: engine died"
    fails(found)
    assert place(found) == (PAUSED, 0, 10)


def test_a_stable_that_is_back_lets_a_person_resume_and_guardrails_roll_back() -> None:
    found = rollout()
    found.stable_changed(able=False)
    found.stable_changed(able=True)
    assert found.state is PAUSED
    found.resume("cli")
    found.breach("errors", "bad")
    assert found.state is ROLLED_BACK


def test_new_files_of_stable_begin_the_step_anew() -> None:
    found = rollout()
    pass_time(found, 500, 3)
    found.restart_evidence("files of version 3 changed")
    assert (found.requests, found.spent_secs, found.evidence_of) == (0, 0, 1)
    assert place(found) == (STEP, 0, 10)


def test_a_load_that_fails_ends_it_before_any_traffic() -> None:
    found = rollout(begun=False)
    found.fail("golden request 'capital' failed")
    assert place(found) == (ROLLED_BACK, 0, 0)


def test_a_newer_version_supersedes_it() -> None:
    found = rollout()
    found.supersede("version 5 is there")
    assert place(found) == (RolloutState.SUPERSEDED, 0, 0)


def test_a_person_promotes_or_aborts_from_every_open_state() -> None:
    for begun in (False, True):
        found = rollout(begun=begun)
        found.promote("cli")
        assert place(found) == (PROMOTED, 0, 100)
        found = rollout(begun=begun)
        found.abort("cli")
        assert place(found) == (ABORTED, 0, 0)


@pytest.mark.parametrize(
    ("request_", "state"),
    [
        (lambda found: found.pause("cli"), "waiting, expected step, baking"),
        (lambda found: found.resume("cli"), "waiting, expected paused"),
        (lambda found: (found.begin(), found.start("cli")), "step, expected waiting"),
        (lambda found: (found.abort("cli"), found.promote("cli")), "aborted, expected waiting, "),
        (lambda found: (found.abort("cli"), found.abort("cli")), "aborted, expected waiting, "),
        (lambda found: (found.abort("cli"), found.set_weight(5, "x")), "aborted, expected wait"),
    ],
    ids=["pause", "resume", "start", "promote", "abort", "weight"],
)
def test_a_request_that_does_not_fit_the_state_is_refused(
    request_: Callable[[Rollout], object], state: str
) -> None:
    with pytest.raises(InferenceError) as caught:
        request_(rollout(begun=False))
    assert f"the rollout of version 4 is {state}" in caught.value.message


def test_nothing_happens_after_the_end() -> None:
    found = rollout()
    found.abort("cli")
    before = msgspec.json.encode(found)
    pass_time(found, 1e9)
    found.dead_on_arrival("its first 5 requests failed")
    found.breach("errors", "bad")
    found.stable_changed(able=True)
    assert msgspec.json.encode(found) == before


def test_a_rollout_that_was_on_disk_continues_where_it_was() -> None:
    found = rollout()
    pass_time(found, 599, 3)
    again = msgspec.json.decode(msgspec.json.encode(found), type=Rollout)
    assert again == found
    pass_time(again, 1)
    assert place(again) == (STEP, 1, 50)


def test_a_shadow_step_copies_requests_and_answers_none() -> None:
    found = rollout(PlanStep(shadow=20, min_requests=0), PlanStep(weight=100))
    assert (found.shadow, found.weight, found.state) == (20, 0, STEP)
    pass_time(found, 0)
    assert (found.shadow, found.weight) == (0, 100)
