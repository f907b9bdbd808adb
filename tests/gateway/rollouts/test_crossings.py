"""Rollouts of models that sleep, that ensembles call, that clients load, and of object storage."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.memory_settings import ModelMemory
from gateway.models.repository import Override
from gateway.settings import ControlMode
from gateway.storage.mirror.cache import RemoteCache
from gateway.storage.mirror.downloads import Transfers
from gateway.storage.mirror.mirror import Mirror
from gateway.storage.mirror.settings import CacheBound
from tests.builders import WAIT_SECS, soon
from tests.gateway.models.ensembles import chain
from tests.gateway.models.golden.files import write_golden
from tests.gateway.models.mirrored import config
from tests.gateway.rollouts.servers import BROKEN, NumberedBackend, RolloutServer
from tests.registries import ALL_VERSIONS, write
from tests.remote_stores import MemoryStore

Starting = Callable[..., Awaitable[RolloutServer]]
HALF: dict[str, Any] = {"steps": [{"weight": 50, "for": "10m"}, {"weight": 100, "for": "1h"}]}
GOLDEN: dict[str, Any] = {"guardrails": {"golden": {"every": "1s"}}}
ON_DEMAND = ModelMemory(on_demand=True)
EXPLICIT = ControlMode.EXPLICIT
CONFIG_OF_1 = """{"backend": "scripted", "version_policy": {"specific": {"versions": [1]}},
  "input": [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}],
  "output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]}]}"""


async def asleep(starting: Starting, **plan: Any) -> RolloutServer:
    """A server that is started during a rollout: both versions are asleep until a request."""
    first = await starting(memory=ON_DEMAND)
    await first.publish(2, **plan)
    await first.stop()
    server = await starting(memory=ON_DEMAND)
    assert all(server.model(each).instances.asleep for each in "12")
    return server


async def test_versions_that_are_asleep_get_their_requests_and_wake(starting: Starting) -> None:
    server = await asleep(starting, **HALF)
    server.tick(1)
    assert server.place == ("step", 50)
    assert await server.asked(60) == {"1", "2"}
    assert server.place == ("step", 50)


async def test_requests_that_wake_their_version_are_no_evidence(starting: Starting) -> None:
    server = await asleep(starting, steps=[{"weight": 100, "for": "1h"}])
    assert await server.ask() == await server.ask() == "2"
    server.tick(1)
    assert server.rollouts.describe("m")["requests"] == 1


async def test_a_candidate_that_cannot_wake_is_rolled_back(
    starting: Starting, backend: NumberedBackend
) -> None:
    server = await asleep(starting, **HALF)
    backend.refusals["2"] = BROKEN
    await server.asked(200)
    assert server.place == ("rolled_back", 0)
    assert await server.asked(10) == {"1"}


async def test_a_copy_wakes_a_candidate_that_is_asleep(starting: Starting) -> None:
    shadow = {"shadow": 100, "for": "10m"}
    server = await asleep(starting, steps=[shadow, {"weight": 100, "for": "1h"}])
    assert await server.asked(2) == {"1"}
    await server.eventually(lambda: not server.model("2").instances.asleep)
    server.tick(1)
    assert server.rollouts.describe("m")["requests"] == 1
    assert server.place == ("step", 0)


@pytest.mark.parametrize(("room", "answer"), [(2, "UNAVAILABLE"), (3, "1")])
async def test_other_models_never_have_the_versions_of_a_rollout_sleep(
    starting: Starting, tmp_path: Path, room: int, answer: str
) -> None:
    write(tmp_path / "models", "other", 1)
    server = await starting(memory=ModelMemory(on_demand=True, models=room))
    await server.publish(2, **HALF)
    assert await server.asked(60) == {"1", "2"}
    assert await server.ask(model="other") == answer
    assert not any(server.model(each).instances.asleep for each in "12")


async def test_stable_answers_for_a_candidate_without_memory_which_passes_no_step(
    starting: Starting,
) -> None:
    server = await starting(memory=ModelMemory(on_demand=True, models=1))
    await server.publish(2, **HALF)
    assert await server.asked(300) <= {"1", "2"}
    assert await server.asked(60) == {"1"}
    server.tick()
    server.tick(600)
    has_answered_once = ("paused", 50)
    assert server.place in (has_answered_once, ("rolled_back", 0))


@pytest.mark.parametrize("policy", ["", ALL_VERSIONS])
async def test_an_ensemble_calls_stable_until_the_promotion(
    starting: Starting, tmp_path: Path, policy: str
) -> None:
    folder = tmp_path / "models"
    write(folder, "m", 1, more=policy)
    write(folder, "e", 1, text=chain("m"))
    server = await starting()
    write(folder, "m", 2, more=policy)
    server.plan(**HALF)
    await soon(server.control.poll())
    assert server.place == ("step", 50)
    assert await server.asked(10, model="e") == {"1"}
    server.rollouts.promote("m", "ann")
    ensemble = server.dataplane.model("e", "")
    await server.eventually(lambda: server.dataplane.model("e", "") is not ensemble)
    assert await server.asked(10, model="e") == {"2"}
    assert await server.ask() == "2"


async def test_a_load_of_one_version_during_a_rollout_leaves_the_rollout_alone(
    starting: Starting, tmp_path: Path
) -> None:
    server = await starting(control_mode=EXPLICIT)
    await server.control.load("m")
    write(tmp_path / "models", "m", 2)
    server.plan(**HALF)
    await server.control.load("m")
    for versions in (1,), (2,), (1, 2):
        await server.control.load("m", Override(versions=frozenset(versions)))
        assert (server.versions, server.place) == (["1", "2"], ("step", 50))
    with pytest.raises(InferenceError, match="version 2 of model 'm' is part of a rollout"):
        await server.control.unload("m", frozenset({2}))
    assert (server.versions, server.place) == (["1", "2"], ("step", 50))


async def test_a_load_of_a_version_that_was_rolled_back_is_refused(
    starting: Starting, tmp_path: Path
) -> None:
    server = await starting(control_mode=EXPLICIT)
    await server.control.load("m")
    write(tmp_path / "models", "m", 2)
    server.plan(**HALF)
    await server.control.load("m", Override(versions=frozenset({2})))
    server.rollouts.abort("m", "ann")
    await server.until_versions("1")
    for _ in range(2):
        with pytest.raises(InferenceError, match="rolled back") as e:
            await server.control.load("m", Override(versions=frozenset({2})))
        assert e.value.code is Code.INVALID_ARG
        assert (server.versions, server.place) == (["1"], ("aborted", 0))


async def test_a_version_of_a_client_s_config_is_begun_again(
    starting: Starting, tmp_path: Path
) -> None:
    write(tmp_path / "models", "m", 2)
    server = await starting(control_mode=EXPLICIT)
    await server.control.load("m", Override(config=CONFIG_OF_1))
    await server.rollouts.start("m", 2, "ann")
    server.rollouts.abort("m", "ann")
    await server.until_versions("1")
    await server.rollouts.start("m", 2, "ann", again=True)
    assert (server.versions, server.place) == (["1", "2"], ("step", 10))


@pytest.mark.parametrize("has_plan", [False, True])
async def test_a_promoted_version_stays_although_it_is_older(
    starting: Starting, tmp_path: Path, *, has_plan: bool
) -> None:
    write(tmp_path / "models", "m", 2)
    if has_plan:
        (tmp_path / "models" / "m" / "rollout.json").write_text("{}")
    server = await starting()
    await server.rollouts.start("m", 1, "ann")
    server.rollouts.promote("m", "ann")
    await server.until_versions("1")
    server.plan(labels={"old": 1}) if has_plan else write(tmp_path / "models", "m", more="# new")
    await soon(server.control.poll())
    assert (server.versions, await server.ask()) == (["1"], "1")
    (tmp_path / "models" / "m" / "2" / "weights").write_text("new")
    await soon(server.control.poll())
    assert "2" in server.versions


async def test_a_client_s_config_overrules_a_promotion_without_a_plan(
    starting: Starting, tmp_path: Path
) -> None:
    server = await starting(control_mode=EXPLICIT)
    await server.control.load("m")
    write(tmp_path / "models", "m", 2)
    await server.rollouts.start("m", 2, "ann")
    server.rollouts.promote("m", "ann")
    await server.until_versions("2")
    await server.control.load("m", Override(config=CONFIG_OF_1))
    assert (server.versions, await server.ask()) == (["1"], "1")


async def test_golden_requests_wake_no_candidate(starting: Starting) -> None:
    server = await asleep(starting, **HALF, **GOLDEN)
    answer = {"request": {"text": "x"}, "expect": {"text": {"equals": "0"}}, "versions": [2]}
    write_golden(server.folder / "m", "g", answer)
    server.tick(1)
    await asyncio.sleep(1.2)  # until after the next round
    assert server.model("2").instances.asleep
    assert server.place == ("step", 50)


async def test_a_model_in_object_storage_rolls_by_polls(
    starting: Starting, tmp_path: Path, backend: NumberedBackend
) -> None:
    store = MemoryStore()
    store.put("m/config.pbtxt", config())
    store.put("m/rollout.json", json.dumps({**HALF, **GOLDEN}).encode())
    expect = {"text": {"equals": "2"}}
    golden = {"request": {"text": "x"}, "expect": expect, "versions": [2]}
    store.put("m/golden/g.json", json.dumps(golden).encode())
    store.put("m/1/weights", b"1")
    cache = RemoteCache(tmp_path / "cache", CacheBound(1 << 30))
    mirror = Mirror(store, cache, Transfers(pause_secs=0), settle_secs=5.0)
    mirror.open()
    server = await starting(mirror=mirror, control_mode=ControlMode.POLL, poll_secs=3600)

    async def poll() -> None:
        for _ in range(2):  # a change is shown by the second listing
            await soon(server.control.poll())

    store.put("m/2/weights", b"2")
    await poll()
    assert await server.asked(60) == {"1", "2"}
    server.rollouts.abort("m", "ann")
    await server.until_versions("1")
    await poll()
    assert (server.versions, server.place) == (["1"], ("aborted", 0))
    store.reads.clear()
    store.put("m/1/weights", b"1 again")
    await poll()
    assert (server.versions, store.reads) == (["1"], ["m/1/weights"])
    tree = server.model("1").tree
    assert tree is not None
    assert not (tree.path / "2").exists()
    store.put("m/2/weights", b"2 again")
    await poll()
    assert (server.versions, server.place) == (["1", "2"], ("step", 50))
    backend.errors["2"] = BROKEN
    async with asyncio.timeout(WAIT_SECS):
        while server.place[0] != "rolled_back":
            server.tick()
            await asyncio.sleep(0.01)
    assert server.rollouts.history("m")[-1].by == "guardrail:golden"
