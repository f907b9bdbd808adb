"""The status of a fleet: `GET /v2/fleet` of both ends, and metrics that add up."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from gateway.dataplane import DataPlane
from gateway.errors import InferenceError
from gateway.fleet import connection, status
from gateway.fleet.choice import ReplicaState
from gateway.fleet.metrics import ModelCounts, ReplicaCounts
from gateway.fleet.router import OTHER_CONFIG, OWN_MODEL
from gateway.messages import SequenceTag, Usage
from tests.builders import TEXT, LoadedModels, add_model, soon, text_request
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.in_one_loop import get, metrics, pair
from tests.gateway.fleet.test_router import CHANGED, Routed, answered, calls, routing
from tests.serving import write_model

OF_TEXT = 'model="text",version="1"'


class Fleet(NamedTuple):
    """A router and two replicas of `text`."""

    routed: Routed
    first: FakeReplica
    second: FakeReplica


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 0.01)
    async with listening() as first, listening() as second:
        for each in (first, second):
            each.offer(offered(TEXT))
        async with routing(tmp_path, first, second) as routed:
            routed.dataplane.fleet = routed.router
            yield Fleet(routed, first, second)


def total(found: dict[str, float], name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(value for key, value in found.items() if key.partition("{")[0] == name)


async def test_the_metrics_of_a_router_add_up_when_replicas_are_lost(fleet: Fleet) -> None:
    dataplane, replicas = fleet.routed.dataplane, (fleet.first, fleet.second)
    for _ in range(5):
        await answered(fleet.routed, *replicas)
    with dataplane.infer(text_request()) as stream:
        (lost,) = await calls(*replicas)
        (other,) = {*replicas} - {lost}
        lost.links[-1].abort()
        await until(lambda: bool(other.calls))
        other.links[-1].abort()
        with pytest.raises(InferenceError, match="2 replicas or instances were lost"):
            await soon(stream.only())
    await until(lambda: all(len(each.links) == 2 for each in replicas))
    found = await metrics(dataplane)
    assert total(found, "gateway_fleet_requests_total") == 7
    assert found[f"gateway_fleet_wait_seconds_count{{{OF_TEXT}}}"] == 7
    assert found[f"gateway_fleet_retries_total{{{OF_TEXT}}}"] == 1
    assert found[f"gateway_fleet_quarantined_total{{{OF_TEXT}}}"] == 1
    assert total(found, "gateway_fleet_wait_error_seconds_count") == 5
    assert total(found, "nv_inference_request_success") == 5
    assert total(found, "nv_inference_request_failure") == 1
    for each in replicas:
        assert found[f'gateway_fleet_lost_total{{replica="127.0.0.1:{each.port}"}}'] == 1


async def test_a_response_before_its_expected_time_counts_as_sooner(fleet: Fleet) -> None:
    await answered(fleet.routed, fleet.first, fleet.second)
    found = await metrics(fleet.routed.dataplane)
    name = 'gateway_fleet_wait_error_seconds_count{model="text",response="%s",version="1"}'
    assert found[f"gateway_fleet_wait_seconds_sum{{{OF_TEXT}}}"] == pytest.approx(0.05)
    assert (found[name % "sooner"], found[name % "later"]) == (1, 0)


async def test_a_router_counts_cached_tokens_and_their_distance_to_its_own_count(
    fleet: Fleet,
) -> None:
    for cached, prompt in ((0, 100), (64, 200), (None, 300)):
        with fleet.routed.dataplane.infer(text_request()) as stream:
            (replica,) = await calls(fleet.first, fleet.second)
            replica.answer(replica.calls.pop(), "x", Usage(prompt, 1, cached_tokens=cached))
            await soon(stream.only())
    found = await metrics(fleet.routed.dataplane)
    assert found[f"gateway_fleet_prompt_tokens_total{{{OF_TEXT}}}"] == 300
    assert found[f"gateway_fleet_cached_tokens_total{{{OF_TEXT}}}"] == 64
    assert total(found, "gateway_fleet_prefix_error_tokens_count") == 2
    assert total(found, "gateway_fleet_prefix_error_tokens_sum") == 64


def test_fewer_cached_tokens_than_expected_count_apart() -> None:
    counts = ModelCounts()
    counts.computed(Usage(1000, cached_tokens=100), expected_tokens=600)
    counts.computed(Usage(1000, cached_tokens=700), expected_tokens=600)
    counts.computed(Usage(1000, cached_tokens=1000), expected_tokens=2000)
    assert (counts.fewer.total, counts.more.total) == (500, 100)


async def test_each_replica_counts_in_one_state(fleet: Fleet) -> None:
    fleet.second.offer(offered(TEXT), state=ReplicaState.DRAINING)
    await until(lambda: not fleet.routed.router.connections[1].serves(("text", 1)))
    found = await metrics(fleet.routed.dataplane)
    assert total(found, "gateway_fleet_replicas") == 2
    states = {"starting": 0, "ready": 1, "draining": 1, "silent": 0, "lost": 0}
    for state, count in states.items():
        assert found[f'gateway_fleet_replicas{{state="{state}"}}'] == count
    assert found[f"gateway_fleet_model_replicas{{{OF_TEXT}}}"] == 1


async def test_a_router_times_the_pings_of_its_replicas(fleet: Fleet) -> None:
    counts = [each.counts for each in fleet.routed.router.connections]
    await until(lambda: all(each.hop_secs is not None for each in counts))
    found = await metrics(fleet.routed.dataplane)
    for each in (fleet.first, fleet.second):
        assert 0 < found[f'gateway_fleet_hop_seconds{{replica="127.0.0.1:{each.port}"}}'] < 5
    assert total(found, "gateway_fleet_directory_age_seconds") == 0


def test_each_answer_to_a_ping_counts_from_its_own_ping() -> None:
    counts = ReplicaCounts()
    counts.ponged(1.0)
    assert counts.hop_secs is None
    counts.pinged(2.0)
    counts.pinged(3.0)
    for second in (4.0, 5.0, 6.0):
        counts.ponged(second - 0.5)
        assert counts.hop_secs == 1.5
        counts.pinged(second)
    counts.lost()
    counts.pinged(9.0)
    counts.ponged(9.25)
    assert counts.hop_secs == 0.25


async def test_a_router_describes_its_replicas(fleet: Fleet) -> None:
    dataplane = fleet.routed.dataplane
    request = replace(text_request(), sequence=SequenceTag(7, start=True))
    with dataplane.infer(request):
        (pinned,) = await calls(fleet.first, fleet.second)
        found = (await get(dataplane, "/v2/fleet")).json()
    assert (found["fleet"], found["role"]) == ("sluice", "router")
    rows = {row["address"]: row for row in found["replicas"]}
    assert list(rows) == [f"127.0.0.1:{each.port}" for each in (fleet.first, fleet.second)]
    row = rows.pop(f"127.0.0.1:{pinned.port}")
    assert (row["state"], row["reason"]) == ("READY", "")
    assert (row["open_sequences"], row["open_conversations"]) == (1, 0)
    assert 0 <= row["silent_secs"] < 5
    (model,) = row["models"]
    assert (model["name"], model["version"], model["trouble"]) == ("text", "1", "")
    assert (model["in_flight"], model["room"]) == (1, 1023)
    assert model["expected_wait_secs"] == pytest.approx(0.1)
    (idle,) = rows.values()
    assert (idle["open_sequences"], idle["models"][0]["in_flight"]) == (0, 0)


async def test_a_router_describes_refused_offers_with_the_reason(fleet: Fleet) -> None:
    bad = replace(TEXT, name="bad", parameters={"max_in_flight": "many"})
    fleet.second.offer(offered(CHANGED), offered(bad))
    await until(lambda: len(fleet.routed.router.connections[1].models) == 2)
    found = fleet.routed.router.describe()
    metric = f"gateway_fleet_model_replicas{{{OF_TEXT}}}"
    assert (await metrics(fleet.routed.dataplane))[metric] == 1
    (used,), refused = (row["models"] for row in found["replicas"])
    assert used["refused"] == ""
    assert refused[0]["refused"] == OTHER_CONFIG
    assert "max_in_flight" in refused[1]["refused"]


async def test_a_router_with_an_own_model_describes_why_it_does_not_use_that_of_a_replica(
    tmp_path: Path,
) -> None:
    add_model(tmp_path, "text", 'backend: "nothing"')
    async with listening() as replica:
        replica.offer(offered(TEXT))
        async with routing(tmp_path, replica) as routed:
            (row,) = routed.router.describe()["replicas"]
            assert row["models"][0]["refused"] == OWN_MODEL


async def test_a_router_describes_a_replica_that_is_not_connected(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 60)
    fleet.first.links[-1].abort()
    await until(lambda: fleet.routed.router.connections[0].state is None)
    monkeypatch.setattr(status, "SILENT_SECS", -1)
    found = (await get(fleet.routed.dataplane, "/v2/fleet")).json()["replicas"]
    assert [row["state"] for row in found] == ["LOST", "SILENT"]
    assert (found[0]["reason"], found[0]["silent_secs"]) == ("it has disconnected", None)
    assert found[0]["models"] == []


async def test_a_server_without_a_fleet_describes_none() -> None:
    answer = await get(DataPlane(LoadedModels()), "/v2/fleet")  # type: ignore[arg-type]
    assert answer.status_code == 404
    assert "part of no fleet" in answer.json()["error"]


async def test_both_ends_describe_a_request_in_flight(tmp_path: Path) -> None:
    config = 'backend: "identity"\n'
    config += 'input { name: "text_input" data_type: TYPE_STRING dims: [1] }\n'
    config += 'output { name: "text_output" data_type: TYPE_STRING dims: [1] }\n'
    config += 'parameters { key: "delay_us" value { string_value: "60000000" } }\n'
    write_model(tmp_path / "models", "text", config)
    (tmp_path / "nothing").mkdir()
    async with pair(tmp_path / "models", tmp_path / "nothing") as (router, replica):
        with router.infer(text_request()):
            await until(lambda: replica.in_flight == 1)
            there = (await get(replica, "/v2/fleet")).json()
            here = (await get(router, "/v2/fleet")).json()
        assert (there["role"], there["state"]) == ("replica", "READY")
        (link,) = there["routers"]
        assert (link["id"], link["in_flight"]) == (here["id"], 1)
        assert here["replicas"][0]["id"] == there["id"]
        assert here["replicas"][0]["models"][0]["in_flight"] == 1
        assert (await metrics(replica))["gateway_fleet_routers"] == 1
        await until(lambda: replica.in_flight == 0)
