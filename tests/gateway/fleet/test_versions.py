"""Labels and rollouts of replicas at a router, which has neither of its own."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.fleet import connection
from gateway.fleet.offers import ModelOffer
from gateway.fleet.ray_news import Shares
from gateway.fleet.versions import OfReplica, labels_of, shares_of
from gateway.messages import SequenceTag
from gateway.rollouts.choice import VersionChoice
from gateway.settings import ModelSettings
from tests.builders import TEXT, soon, text_request
from tests.conformance.models import identity
from tests.gateway.fleet.fake_replica import FakeReplica, offered, until
from tests.gateway.fleet.in_one_loop import SETTINGS, pair, running
from tests.gateway.fleet.routing import Routed, answered, calls
from tests.serving import write_model

MODEL = identity("BYTES", "1").replace("INPUT", "text_input").replace("OUTPUT", "text_output")
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 60000000 }\n"
SPECIFIC = "version_policy { specific { versions: 2 } }\n"
HALF = {"steps": [{"weight": 50, "for": "1h"}, {"weight": 100}], "key": ["header:x-user"]}
KEYS = ("header:x-user",)
REQUESTS = 40
"""All of one version at a weight of 50 once in 10^12."""


def version(
    number: int, *names: str, weight: float | None = None, keys: tuple[str, ...] = ()
) -> ModelOffer:
    return msgspec.structs.replace(offered(TEXT, number), names=names, weight=weight, keys=keys)


def replica(*offers: ModelOffer) -> OfReplica:
    return {each.version: each for each in offers}


def rolling(weight: float) -> OfReplica:
    """A replica that shares the requests of versions 1 and 2."""
    return replica(version(1, "stable"), version(2, "canary", weight=weight, keys=KEYS))


AT_1, AT_2 = replica(version(1, "stable")), replica(version(2, "stable"))
PROMOTED = replica(version(1), version(2, "stable", weight=100.0))
TAKEN_BACK = replica(version(1, "stable"), version(2, weight=0.0, keys=KEYS))


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        pytest.param([replica(version(1), version(2))], None, id="no-labels"),
        pytest.param([AT_1, AT_1], None, id="one-version"),
        pytest.param([PROMOTED], None, id="promoted"),
        pytest.param([rolling(10)], Shares(1, 2, 10, KEYS), id="one-rollout"),
        pytest.param([rolling(10), rolling(50)], Shares(1, 2, 30, KEYS), id="mean"),
        pytest.param([rolling(50), AT_1], Shares(1, 2, 25, KEYS), id="not-begun"),
        pytest.param([rolling(50), TAKEN_BACK], Shares(1, 2, 25, KEYS), id="taken-back"),
        pytest.param([TAKEN_BACK], Shares(1, 2, 0, KEYS), id="taken-back-by-all"),
        pytest.param([rolling(100)], Shares(1, 2, 100, KEYS), id="baking"),
        pytest.param([rolling(50), PROMOTED], Shares(1, 2, 75, KEYS), id="promoted-by-one"),
        pytest.param([rolling(50), AT_2, AT_2, AT_2], Shares(1, 2, 87.5, KEYS), id="by-most"),
        pytest.param([AT_1, AT_2, AT_2, AT_2], Shares(1, 2, 75), id="ended-apart"),
    ],
)
def test_the_share_of_a_candidate_is_the_mean_of_those_at_replicas(
    replicas: list[OfReplica], expected: Shares | None
) -> None:
    assert shares_of(replicas) == expected


def test_a_label_has_the_version_of_most_replicas_and_of_as_many_the_higher_one() -> None:
    found = [
        replica(version(1, "old"), version(2, "champion")),
        replica(version(1, "champion"), version(2)),
    ]
    assert labels_of(found) == {"old": 1, "champion": 2}
    assert labels_of([*found, found[1]]) == {"old": 1, "champion": 1}


def versions_of(routed: Routed, count: int = 1) -> set[str]:
    """The versions that requests without one get."""
    found = set()
    for _ in range(count):
        with routed.dataplane.infer(text_request()) as stream:
            found.add(stream.model.version)
    return found


async def test_labels_of_replicas_name_versions_at_a_router(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    dataplane = routed.dataplane
    for each in replicas:
        each.offer(version(1, "stable", "champion"), version(2))
    await until(lambda: dataplane.labels("text") == {"champion": 1, "stable": 1})
    assert dataplane.model("text@champion").version == "1"
    assert dataplane.model("text", "stable").version == "1"
    assert versions_of(routed, 5) == {"1"}
    with pytest.raises(InferenceError, match="set them there") as caught:
        dataplane.set_labels("text", {"champion": 2})
    assert caught.value.code is Code.INVALID_ARG
    with pytest.raises(InferenceError, match="its replicas decide"):
        dataplane.rollouts.pause("text", "test")
    for each in replicas:
        each.offer(version(1), version(2, "champion"))
    await until(lambda: dataplane.labels("text") == {"champion": 2})
    assert versions_of(routed, 5) == {"2"}


async def test_a_router_shares_requests_as_its_replicas_do_and_says_that_it_has_chosen(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    for each in replicas:
        each.offer(*rolling(50).values())
    await until(lambda: routed.dataplane.model("text").chooser is not None)
    assert versions_of(routed, REQUESTS) == {"1", "2"}
    assert routed.router.describe()["rollouts"] == [
        {"model": "text", "stable": 1, "candidate": 2, "weight": 50}
    ]
    for each in replicas:
        each.offer(*PROMOTED.values())
    await until(lambda: routed.dataplane.labels("text") == {"stable": 2})
    for each in replicas:
        each.calls.clear()
    found = await answered(routed, *replicas)
    sent = list(found.requests.values())[-1]
    assert (sent.version, sent.chosen) == ("2", True)
    with routed.dataplane.infer(text_request(version="1")):
        await until(lambda: any(each.calls for each in replicas))
    named = [each.requests[number] for each in replicas for number in each.calls]
    assert [(each.version, each.chosen) for each in named] == [("1", False)]
    assert routed.router.describe()["rollouts"] == []


@pytest.fixture
def _quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PING_SECS", 0.01)


@pytest.mark.usefixtures("_quick_pings")
async def test_stable_answers_while_no_replica_of_the_candidate_takes_requests(
    routed: Routed, replicas: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas[1].offer(version(1, "stable"))
    replicas[0].offer(*rolling(100).values())
    await until(lambda: routed.dataplane.model("text").chooser is not None)
    choice = routed.dataplane.model("text").chooser
    assert isinstance(choice, VersionChoice)
    replicas[0].silent = True
    monkeypatch.setattr(connection, "SILENT_SECS", 0.3)
    await until(lambda: not choice.candidate.takes_requests)
    assert choice.stable.takes_requests
    assert choice.stable.chooser is choice
    assert versions_of(routed, 8) == {"1"}


async def test_sequences_stay_at_their_replicas_when_those_promote_another_version(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    async def place(number: int, *, start: bool = False) -> FakeReplica:
        request = text_request(sequence=SequenceTag(number, start=start))
        with routed.dataplane.infer(request) as stream:
            (found,) = await calls(*replicas)
            found.answer(found.calls.pop(), "hello")
            await soon(stream.only())
        return found

    async def all_offer(offers: OfReplica) -> None:
        for each in replicas:
            each.offer(*offers.values())
        expected = {("text", number): each for number, each in offers.items()}
        await until(lambda: all(each.models == expected for each in routed.router.connections))

    await all_offer(rolling(0))
    first = [await place(number, start=True) for number in range(1, 17)]
    await all_offer(PROMOTED)
    assert versions_of(routed) == {"2"}
    await until(lambda: any(each.calls for each in replicas))
    for each in replicas:
        each.calls.clear()
    assert [await place(number) for number in range(1, 17)] == first


class Fleet(NamedTuple):
    """A router, and its replica with a rollout of version 2."""

    router: DataPlane
    replica: DataPlane

    async def ask(self, user: str = "", **fields: Any) -> str:
        """The version that the router shows in the answer to a user."""
        request = text_request(**fields)
        chooser = self.router.model("text").chooser
        if chooser is not None:
            request = chooser.keyed(request, {"x-user": user}.get)
        with self.router.infer(request) as stream:
            await soon(stream.only())
            return str(stream.model.version)

    def executed(self) -> list[int]:
        """The requests that each version at the replica has executed."""
        return [each.statistics.success.count for each in self.replica.models()]

    async def weighs(self, weight: float) -> None:
        """Set the weight at the replica, and wait until the router has it."""
        self.replica.rollouts.set_weight("text", weight, "test")
        await until(lambda: self.weight() == weight)

    def weight(self) -> float | None:
        """The weight that the router knows."""
        chooser = self.router.model("text").chooser
        return chooser.weight if isinstance(chooser, VersionChoice) else None


@pytest.fixture(params=[MODEL], ids=["identity"])
async def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    models, nothing = tmp_path / "models", tmp_path / "nothing"
    write_model(models, "text", request.param)
    nothing.mkdir()
    state = {"state_directory": tmp_path / "state"}
    async with pair(models, nothing, of_replica=state) as (router, replica):
        (models / "text" / "2").mkdir()
        await soon(replica.rollouts.start("text", 2, "test", members=HALF))
        found = Fleet(router, replica)
        await until(lambda: found.weight() == 50)
        yield found


async def test_a_rollout_of_a_replica_works_through_a_router(fleet: Fleet) -> None:
    found = Counter([await fleet.ask() for _ in range(REQUESTS)])
    assert fleet.executed() == [found["1"], found["2"]]
    assert min(found.values()) > 0
    assert {await fleet.ask(version="2"), await fleet.ask(version="canary")} == {"2"}
    fleet.replica.rollouts.tick()
    assert fleet.replica.rollouts.describe("text")["requests"] == found["2"]
    await fleet.weighs(0)
    assert {await fleet.ask() for _ in range(5)} == {"1"}
    fleet.replica.rollouts.promote("text", "test")
    assert fleet.replica.labels("text") == {"stable": 2}
    # Without a plan the label goes with version 1, which may be before the router has read it.
    await until(lambda: fleet.router.labels("text") in ({"stable": 2}, {}))
    assert {await fleet.ask() for _ in range(5)} == {"2"}
    await until(lambda: [each.version for each in fleet.router.models()] == ["2"])


async def test_a_key_gets_one_version_and_is_that_of_the_evidence_at_the_replica(
    fleet: Fleet,
) -> None:
    users = [f"user-{number}" for number in range(20)]
    first = [await fleet.ask(user) for user in users]
    assert set(first) == {"1", "2"}
    assert [await fleet.ask(user) for user in users] == first
    await fleet.weighs(60)
    later = [await fleet.ask(user) for user in users]
    assert [b for a, b in zip(first, later, strict=True) if a == "2"] == ["2"] * first.count("2")


@pytest.mark.parametrize("fleet", [MODEL + SEQUENCES], ids=["sequences"], indirect=True)
async def test_a_sequence_stays_at_its_version_when_the_replica_takes_it_back(fleet: Fleet) -> None:
    await fleet.weighs(100)
    assert await fleet.ask(sequence=SequenceTag(7, start=True)) == "2"
    fleet.replica.rollouts.abort("text", "test")
    await until(lambda: fleet.weight() == 0)
    assert await fleet.ask(sequence=SequenceTag(8, start=True, end=True)) == "1"
    assert await fleet.ask(sequence=SequenceTag(7)) == "2"
    assert fleet.executed() == [1, 2]
    await fleet.ask(sequence=SequenceTag(7, end=True))
    await until(lambda: [each.version for each in fleet.router.models()] == ["1"])


async def test_a_request_for_a_candidate_that_was_taken_back_meanwhile_is_answered_by_stable(
    fleet: Fleet,
) -> None:
    await fleet.weighs(100)
    with ExitStack() as owner:
        fleet.replica.rollouts.abort("text", "test")  # the router does not know it yet
        stream = owner.enter_context(fleet.router.infer(text_request()))
        assert stream.model.version == "2"
        await soon(stream.only())
    assert fleet.executed()[0] == 1


@pytest.mark.parametrize(
    ("left_out", "policy", "loaded"),
    [({"text": {2}}, "", ["1"]), ({}, "", ["2"]), ({"text": {2}}, SPECIFIC, ["1"])],
    ids=["of-stable", "of-the-candidate", "of-stable-that-the-policy-selects-no-more"],
)
async def test_a_replica_of_a_controller_loads_its_versions_and_begins_no_rollout(
    tmp_path: Path, left_out: Mapping[str, Set[int]], policy: str, loaded: list[str]
) -> None:
    write_model(tmp_path / "models", "text", MODEL + policy, (1, 2))
    plan = tmp_path / "models" / "text" / "rollout.json"
    plan.write_text('{"labels": {"champion": 1}}')
    models = ModelSettings(repositories=(tmp_path / "models",), left_out=left_out)
    async with running(replace(SETTINGS, models=models)) as (server, _):
        found = server.dataplane
        assert [each.version for each in found.models()] == loaded
        assert found.labels("text")["champion"] == 1
        assert found.rollouts.describe("text")["stable"] == int(loaded[0])
