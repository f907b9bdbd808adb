"""Breaches and roll-backs of rollouts that cannot react at once."""

from collections.abc import Callable

import msgspec
import pytest

from gateway.rollouts.plan import Reaction
from gateway.rollouts.rollout import Rollout
from tests.gateway.rollouts.steps import (
    PAUSED,
    ROLLED_BACK,
    STEP,
    WAITING,
    breaches,
    dies,
    last,
    place,
    rollout,
)


def test_a_breach_of_a_rollout_that_a_person_has_paused_renews_the_evidence() -> None:
    found = rollout(on_breach=Reaction.PAUSE)
    found.pause("cli")
    found.breach("errors", "bad")
    found.resume("cli")
    assert (found.state, found.evidence_of) == (STEP, 1)


@pytest.mark.parametrize("begin", [Rollout.begin, lambda found: found.start("cli")], ids=range(2))
def test_a_breach_of_a_rollout_that_waits_renews_the_evidence(
    begin: Callable[[Rollout], None],
) -> None:
    found = rollout(begun=False)
    found.breach("golden", "bad")
    assert place(found) == (WAITING, 0, 0)
    begin(found)
    assert (found.state, found.evidence_of, found.breached) == (STEP, 1, False)


@pytest.mark.parametrize("fails", [dies, breaches])
def test_a_roll_back_waits_until_stable_is_able(fails: Callable[[Rollout], None]) -> None:
    found = rollout()
    found.stable_changed(able=False)
    fails(found)
    found = msgspec.json.decode(msgspec.json.encode(found), type=Rollout)
    found.dead_on_arrival("later")
    found.stable_changed(able=False)
    assert place(found) == (PAUSED, 0, 10)
    found.stable_changed(able=True)
    assert place(found) == (ROLLED_BACK, 0, 0)
    assert last(found)[0] in {"arrival", "guardrail:errors"}
    assert last(found)[1] != "later"


def test_no_roll_back_is_pending_after_a_resume() -> None:
    found = rollout()
    found.stable_changed(able=False)
    found.breach("errors", "bad")
    found.resume("cli")
    found.stable_changed(able=True)
    assert place(found) == (STEP, 0, 10)


def test_a_rollout_that_waits_is_not_paused_by_its_stable() -> None:
    found = rollout(begun=False)
    found.stable_changed(able=False)
    found.dead_on_arrival("no instance was able")
    assert place(found) == (WAITING, 0, 0)
    found.stable_changed(able=True)
    assert place(found) == (ROLLED_BACK, 0, 0)
    found = rollout(begun=False)
    found.stable_changed(able=False)
    found.start("cli")
    assert place(found) == (STEP, 0, 10)
