"""A router on Ray: it shares requests as the controller says, counts, and passes changes on."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.fleet import router_rollouts
from gateway.fleet.ray_evidence import EvidenceNews
from gateway.fleet.ray_news import ModelNews, RolloutAnswer, RolloutNews, Shares
from gateway.rollouts.changes import RolloutAction
from gateway.rollouts.choice import digest_of, fraction
from gateway.rollouts.requests import change_rollout
from gateway.rollouts.rollout import RolloutState, Transition
from gateway.rollouts.sequential_test import Counts
from tests.builders import soon, text_request
from tests.gateway.fleet.fake_replica import FakeReplica, until
from tests.gateway.fleet.routing import Routed, calls
from tests.gateway.fleet.test_versions import replica, version, versions_of

STABLE, CANDIDATE = version(1, "stable"), version(2, "stable")
"""Each replica calls its only version stable."""
STATE = {"model": "text", "stable": 1, "candidate": 2, "state": "step"}
BEGUN = Transition(state=RolloutState.STEP, step=0, weight=10.0, by="server", reason="loaded")


def news(weight: float, **members: Any) -> Mapping[str, ModelNews]:
    """The model with a rollout of version 2."""
    rollout = RolloutNews(
        state=STATE,
        history=(BEGUN,),
        shares=Shares(1, 2, weight, (), "salt"),
        is_open=True,
        evidence="first",
        guardrails={"errors": {}},
    )
    for name, value in members.items():
        rollout = RolloutNews(**{**_members(rollout), name: value})
    return {"text": ModelNews(rollout=rollout)}


def _members(rollout: RolloutNews) -> dict[str, Any]:
    return {name: getattr(rollout, name) for name in rollout.__struct_fields__}


@pytest.fixture
async def rolling(routed: Routed, replicas: list[FakeReplica]) -> Routed:
    """A router with a replica of each version, and a rollout at weight 0."""
    routed.router.take_news(news(0), {})
    replicas[0].offer(STABLE)
    replicas[1].offer(CANDIDATE)
    await until(lambda: routed.dataplane.model("text").chooser is not None)
    routed.dataplane.rollouts.controller = routed.router.rollouts
    return routed


async def test_a_candidate_gets_the_share_of_the_controller_and_nothing_before(
    rolling: Routed,
) -> None:
    assert versions_of(rolling, 20) == {"1"}
    assert rolling.dataplane.labels("text") == {"stable": 1, "canary": 2}
    rolling.router.take_news(news(50), {})
    assert versions_of(rolling, 40) == {"1", "2"}
    ended = news(0, shares=Shares(2, 1, 0.0), is_open=False, evidence="")
    rolling.router.take_news(ended, {})
    assert versions_of(rolling, 20) == {"2"}
    assert rolling.dataplane.labels("text") == {"stable": 2}


async def test_a_replica_of_the_candidate_that_is_there_first_is_not_stable(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    routed.router.take_news(news(0), {})
    for each in replicas:
        each.offer(CANDIDATE)
    await until(lambda: [each.version for each in routed.dataplane.models()] == ["2"])
    assert routed.dataplane.labels("text") == {}
    for each in replicas:
        each.offer(*replica(version(1), CANDIDATE).values())
    await until(lambda: routed.dataplane.labels("text") == {"stable": 1, "canary": 2})
    assert versions_of(routed, 20) == {"1"}


async def test_a_key_has_the_version_by_the_salt_of_the_controller(rolling: Routed) -> None:
    rolling.router.take_news(news(50, shares=Shares(1, 2, 50.0, ("parameter:user",), "salt")), {})
    for user in map(str, range(10)):
        with rolling.dataplane.infer(text_request(parameters={"user": user})) as stream:
            is_candidate = fraction(digest_of(b"salt", user.encode())) < 0.5
            assert (stream.model.version == "2") == is_candidate


def counts(routed: Routed) -> EvidenceNews:
    return routed.router.news().evidence["text"]


async def test_requests_without_a_version_are_counted_for_the_controller(
    rolling: Routed, replicas: list[FakeReplica]
) -> None:
    rolling.router.take_news(news(100), {})
    for _ in range(2):
        with rolling.dataplane.infer(text_request()) as stream:
            (found,) = await calls(*replicas)
            found.fail(found.calls.pop(), InferenceError(Code.INTERNAL, "broken"))
            with pytest.raises(InferenceError, match="broken"):
                await soon(stream.only())
    with rolling.dataplane.infer(text_request(version="2")) as stream:
        (found,) = await calls(*replicas)
        found.answer(found.calls.pop(), "hello")
        await soon(stream.only())
    found_counts = counts(rolling)
    assert (found_counts.evidence, found_counts.ended, found_counts.failures) == ("first", 2, 2)
    assert (found_counts.keyless, found_counts.has_arrived) == (2, False)
    rolling.router.take_news(news(100, evidence="second"), {})
    assert (counts(rolling).evidence, counts(rolling).ended) == ("second", 0)
    rolling.router.take_news(news(0, is_open=False, evidence=""), {})
    assert rolling.router.news().evidence == {}


async def test_counts_that_the_controller_has_are_not_repeated(rolling: Routed) -> None:
    rolling.router.take_news(news(100), {})
    versions = rolling.router.rollouts._versions["text"]  # noqa: SLF001 - blocks take seconds
    evidence = versions._evidence  # noqa: SLF001
    assert evidence is not None
    evidence.add(0, Counts(20, 0), Counts(2, 1))
    found = counts(rolling)
    assert [each.number for each in found.parts] == [1]
    rolling.router.take_news(news(100, heard={found.source: 1}), {})
    assert counts(rolling).parts == ()


async def test_the_state_of_a_rollout_at_a_router_is_that_of_the_controller(
    rolling: Routed,
) -> None:
    rollouts = rolling.dataplane.rollouts
    assert rollouts.describe_all() == [STATE]
    assert rollouts.describe("text") == STATE
    assert rollouts.history("text") == [BEGUN]
    rolling.router.take_news({"text": ModelNews()}, {})
    assert rollouts.describe_all() == []
    assert rollouts.describe("text") == {"model": "text", "stable": None}
    with pytest.raises(InferenceError, match="'other' is not loaded"):
        rollouts.describe("other")


async def test_a_change_is_repeated_to_the_controller_until_it_has_answered(
    rolling: Routed,
) -> None:
    def change(action: RolloutAction, **members: Any) -> "asyncio.Task[dict[str, Any]]":
        return asyncio.create_task(
            change_rollout(rolling.dataplane.rollouts, "text", action, members, "api:1")
        )

    asked = change(RolloutAction.WEIGHT, weight=25)
    await until(lambda: bool(rolling.router.news().changes))
    (sent,) = rolling.router.news().changes
    assert (sent.model, sent.action, sent.members) == ("text", "weight", {"weight": 25})
    rolling.router.take_news(news(25, answers={sent.id: RolloutAnswer()}), {})
    assert await soon(asked) == STATE
    assert rolling.router.news().changes == ()
    asked = change(RolloutAction.PAUSE)
    await until(lambda: bool(rolling.router.news().changes))
    (sent,) = rolling.router.news().changes
    refused = RolloutAnswer("it is paused", Code.INVALID_ARG)
    rolling.router.take_news(news(25, answers={sent.id: refused}), {})
    with pytest.raises(InferenceError, match="it is paused") as caught:
        await soon(asked)
    assert caught.value.code is Code.INVALID_ARG


async def test_a_long_reason_is_cut_and_too_many_open_changes_are_refused(
    rolling: Routed,
) -> None:
    rollouts = rolling.router.rollouts
    members = {"reason": "x" * 100_000}
    asked = [
        asyncio.create_task(rollouts.change("text", RolloutAction.PAUSE, members, "api:1"))
        for _ in range(router_rollouts.MOST_CHANGES)
    ]
    await until(lambda: len(rollouts.changes) == len(asked))
    assert len(rollouts.changes[0].members["reason"]) < 600
    with pytest.raises(InferenceError, match="32 changes wait for the controller") as caught:
        await rollouts.change("text", RolloutAction.PAUSE, members, "api:1")
    assert caught.value.code is Code.UNAVAILABLE
    answers = {each.id: RolloutAnswer() for each in rollouts.changes}
    rolling.router.take_news(news(25, answers=answers), {})
    await soon(asyncio.gather(*asked))


async def test_all_routers_take_the_salt_of_a_new_rollout_of_two_known_versions(
    rolling: Routed,
) -> None:
    chosen = rolling.dataplane.model("text").chooser
    rolling.router.take_news(news(0), {})
    assert rolling.dataplane.model("text").chooser is chosen
    rolling.router.take_news(news(0, shares=Shares(1, 2, 0.0, (), "other")), {})
    assert rolling.dataplane.model("text").chooser is not chosen


def test_news_with_other_counts_alone_change_no_choice() -> None:
    rollouts = router_rollouts.RouterRollouts()
    assert rollouts.take(news(25))
    assert not rollouts.take(news(25, heard={"r": 1}))
    assert rollouts.take(news(50, heard={"r": 1}))
    assert rollouts.take({})


async def test_a_change_without_an_answer_of_the_controller_is_given_up(
    rolling: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_rollouts, "ANSWER_SECS", 0.01)
    with pytest.raises(InferenceError, match="the controller of the fleet has not answered"):
        await rolling.router.rollouts.change("text", RolloutAction.PAUSE, {}, "api:1")
    assert rolling.router.news().changes == ()
