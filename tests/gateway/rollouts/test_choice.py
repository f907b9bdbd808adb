"""The version of each request while two versions share them."""

from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise

import pytest

from gateway.config import ModelConfig
from gateway.config.scheduling import SequenceBatching
from gateway.dataplane import DataPlane
from gateway.frontends.http.rollout_keys import keyed
from gateway.messages import InferRequest, SequenceTag
from gateway.models.model import Model
from gateway.policy.tenants import TenantRules, Tenants
from gateway.rollouts.choice import VersionChoice, digest_of, fraction
from gateway.rollouts.evidence import Evidence
from gateway.rollouts.guardrails import read_guardrails
from gateway.rollouts.observation import Arm, Observation
from gateway.rollouts.plan import KeyPlace
from tests.builders import (
    TEXT,
    LoadedModels,
    ScriptedInstance,
    read_all,
    settle,
    soon,
    text_request,
)
from tests.conftest import Serve
from tests.gateway.conversations.chats import CHAT, Talk, turn

SEQUENCES = replace(
    TEXT, sequence_batching=SequenceBatching(max_sequence_idle_microseconds=3_600_000_000)
)


class Pair:
    """Two versions of a model behind a data plane, whose label `stable` is on the first."""

    def __init__(
        self,
        serve: Serve,
        config: ModelConfig = TEXT,
        *sources: KeyPlace,
        tenants: Tenants | None = None,
    ) -> None:
        self.instances = ScriptedInstance(), ScriptedInstance()
        self.stable, self.candidate = (
            serve(each, config=config, tenants=tenants) for each in self.instances
        )
        self.candidate.version = "2"
        self.dataplane = DataPlane(LoadedModels(self.candidate, self.stable))  # type: ignore[arg-type]
        self.conversations = self.dataplane.conversations
        self.choice = VersionChoice(
            self.stable, self.candidate, self.conversations, sources, b"salt"
        )
        self.stable.chooser = self.candidate.chooser = self.choice

    def of(self, request: InferRequest) -> str:
        """The version chosen for a request."""
        return self.choice.choose(request)[0].version

    def share(self) -> int:
        """The percentage of requests without a key that the candidate gets."""
        return round(sum(self.of(text_request()) == "2" for _ in range(2000)) / 20)


@pytest.mark.parametrize("weight", [0, 10, 50, 100])
async def test_requests_without_a_key_are_shared_by_weight(serve: Serve, weight: float) -> None:
    pair = Pair(serve)
    pair.choice.weight = weight
    assert abs(pair.share() - weight) <= (6 if 0 < weight < 100 else 0)


async def test_a_higher_weight_only_adds_keys(serve: Serve) -> None:
    pair = Pair(serve, TEXT, KeyPlace("parameter", "user"))
    requests = [text_request(parameters={"user": number}) for number in range(300)]
    chosen = []
    for weight in (0, 10, 50, 99, 100):
        pair.choice.weight = weight
        chosen.append({n for n, request in enumerate(requests) if pair.of(request) == "2"})
        assert abs(len(chosen[-1]) / 3 - weight) <= 6
    for fewer, more in pairwise(chosen):
        assert fewer <= more


def test_the_salt_decides_which_keys_are_first() -> None:
    keys = [str(number).encode() for number in range(200)]
    first, second = (
        {k for k in keys if fraction(digest_of(salt, k)) < 0.1} for salt in (b"a", b"b")
    )
    assert 8 <= len(first) <= 35
    assert len(first & second) < len(first) / 2


async def test_the_first_key_that_a_request_has_decides(serve: Serve) -> None:
    sources = KeyPlace("header", "x-user"), KeyPlace("openai", "user")
    pair = Pair(serve, TEXT, *sources, KeyPlace("parameter", "user"))
    pair.choice.weight = 50
    by_header = pair.choice.keyed(text_request(), {"x-user": "a"}.get)
    with_both = pair.choice.keyed(
        text_request(parameters={"user": "b"}), {"x-user": "a"}.get, {"user": "c"}
    )
    by_member = pair.choice.keyed(text_request(), {}.get, {"user": "c", "other": 3})
    assert by_header.sticky == {"header:x-user": "a"}
    assert with_both.sticky == {"header:x-user": "a", "openai:user": "c"}
    assert by_member.sticky == {"openai:user": "c"}
    assert {pair.of(by_header) for _ in range(20)} == {pair.of(with_both)}
    assert pair.choice.keyed(text_request(), {}.get) == text_request()
    assert not pair.choice.keyed(text_request(), {}.get, {"user": 5}).sticky


async def test_headers_are_read_only_for_a_key_among_them(serve: Serve) -> None:
    request, scope = text_request(), {"headers": [(b"x-user", b"a")]}
    by_parameter = Pair(serve, TEXT, KeyPlace("parameter", "user")).choice
    assert keyed(request, by_parameter, {}) is request
    by_header = Pair(serve, TEXT, KeyPlace("header", "x-user")).choice
    assert keyed(request, by_header, scope).sticky == {"header:x-user": "a"}


async def test_a_sequence_stays_where_it_began(serve: Serve) -> None:
    pair = Pair(serve, SEQUENCES)
    pair.choice.weight = 100
    begun = text_request(sequence=SequenceTag(7, start=True))
    with pair.dataplane.infer(begun) as stream:
        (await pair.instances[1].begun()).finish("first")
        assert await soon(read_all(stream)) == ["first"]
    pair.choice.weight = 0
    with pair.dataplane.infer(text_request(sequence=SequenceTag(7, end=True))) as stream:
        (await pair.instances[1].begun()).finish("second")
        assert await soon(read_all(stream)) == ["second"]
    assert pair.of(text_request(sequence=SequenceTag(7))) == "1"
    await settle()
    assert pair.instances[0].executions == []


async def test_a_conversation_stays_until_it_moves_with_its_history(serve: Serve) -> None:
    pair = Pair(serve, CHAT)
    pair.choice.weight = 100
    await Talk(pair.dataplane, pair.instances[1]).say("hi", "hello", start=True)
    pair.choice.weight = 0
    assert pair.of(turn("more")) == "2"
    pair.conversations.move(pair.candidate, pair.stable)
    assert pair.of(turn("more")) == "1"
    told = await Talk(pair.dataplane, pair.instances[0]).say("more", "yes")
    assert [each["content"] for each in told] == ["hi", "hello", "more"]
    assert pair.conversations.count(pair.candidate) == 0


async def test_a_turn_under_way_ends_where_it_began_and_the_next_one_moves(serve: Serve) -> None:
    pair = Pair(serve, CHAT)
    first, second = pair.instances
    with ExitStack() as stack:
        running = stack.enter_context(pair.dataplane.infer(turn("hi", start=True)))
        execution = await first.begun()
        pair.conversations.move(pair.stable, pair.candidate)
        pair.choice.weight = 100
        waiting = stack.enter_context(pair.dataplane.infer(turn("more")))
        execution.finish("hello")
        assert await soon(read_all(running)) == ["hello"]
        following = await second.begun()
        following.finish("yes")
        assert await soon(read_all(waiting)) == ["yes"]
    assert pair.conversations.count(pair.candidate) == 1


async def test_conversations_of_another_version_fill_the_room_that_is_left(serve: Serve) -> None:
    config = replace(CHAT, parameters={"conversation_max": "2"})
    pair = Pair(serve, config)
    for version, number in ((0, 1), (0, 2), (1, 3)):
        pair.choice.weight = 100 * version
        talk = Talk(pair.dataplane, pair.instances[version])
        await talk.say("hi", "hello", number, start=True)
    pair.conversations.move(pair.stable, pair.candidate)
    assert pair.conversations.count(pair.candidate) == 2
    tags = [SequenceTag(number) for number in (1, 2, 3)]
    found = [pair.conversations.has(pair.candidate, tag) for tag in tags]
    assert found == [False, True, True]


def observed(pair: Pair) -> Evidence:
    evidence = Evidence(read_guardrails({"errors": {}}, "guardrails"))
    pair.choice.observe(evidence)
    return evidence


def fill(pair: Pair, model: Model, stack: ExitStack) -> None:
    model.most_in_flight = 1
    stack.enter_context(model.submit(text_request()))


async def test_stable_answers_for_a_full_candidate_and_the_candidate_gets_an_error(
    serve: Serve,
) -> None:
    pair = Pair(serve)
    evidence = observed(pair)
    pair.choice.weight = 100
    with ExitStack() as stack:
        fill(pair, pair.candidate, stack)
        assert pair.of(text_request()) == "1"
        assert evidence.ended[Arm.CANDIDATE] == 1
        (await pair.instances[1].begun()).finish("done")


@pytest.mark.parametrize(("rules", "most"), [({"a": TenantRules()}, 2), ({}, 1)])
async def test_a_candidate_that_tenants_share_is_full_with_the_most_of_all_tenants(
    serve: Serve, rules: dict[str, TenantRules], most: int
) -> None:
    pair = Pair(serve, tenants=Tenants(rules))
    pair.choice.weight, pair.candidate.most_in_flight = 100, 1
    with ExitStack() as stack:
        for _ in range(most):
            assert pair.of(text_request()) == "2"
            stack.enter_context(pair.candidate.submit(text_request()))
        assert pair.of(text_request()) == "1"
    await settle()


async def test_a_full_stable_sends_nothing_to_the_candidate(serve: Serve) -> None:
    pair = Pair(serve)
    with ExitStack() as stack:
        fill(pair, pair.stable, stack)
        assert pair.of(text_request()) == "1"
        (await pair.instances[0].begun()).finish("done")


async def test_an_able_candidate_answers_for_a_stable_that_has_died(serve: Serve) -> None:
    pair = Pair(serve)
    pair.instances[0].die("it was told to")
    await settle()
    assert pair.of(text_request()) == "2"
    pair.instances[1].die("it was told to")
    await settle()
    assert pair.of(text_request()) == "1"


async def test_the_key_of_an_observed_request_is_a_digest(serve: Serve) -> None:
    pair = Pair(serve, TEXT, KeyPlace("parameter", "user"))
    observed(pair)
    tag = SequenceTag(7, start=True)
    for fields, key in (
        ({"parameters": {"user": "ann"}}, b"ann"),
        ({"sequence": tag}, repr(tag.key).encode()),
    ):
        _, tap = pair.choice.choose(text_request(**fields))
        assert isinstance(tap, Observation)
        assert tap.key == digest_of(b"salt", key)


async def test_requests_are_observed_by_version_and_those_of_a_named_version_are_not(
    serve: Serve,
) -> None:
    pair = Pair(serve)
    evidence = observed(pair)
    for weight, version, arm in ((0, "", Arm.STABLE), (100, "", Arm.CANDIDATE), (0, "2", None)):
        pair.choice.weight = weight
        before = list(evidence.ended)
        with pair.dataplane.infer(text_request(version=version)) as stream:
            instance = pair.instances[int(stream.model.version) - 1]
            (await instance.begun()).finish("done")
            await soon(read_all(stream))
        grown = [after - was for was, after in zip(before, evidence.ended, strict=True)]
        assert grown == [each is arm for each in Arm]
