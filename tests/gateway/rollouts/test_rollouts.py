"""Rollouts of a loaded model: begun by loads, passed by time, ended by decisions."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gateway.errors import Code, InferenceError
from gateway.policy.audit import AuditLog
from gateway.rollouts.state import StateDirectory
from tests.builders import settle, soon
from tests.gateway.rollouts.servers import BROKEN, TURNS, NumberedBackend, RolloutServer
from tests.registries import write

Starting = Callable[[], Awaitable[RolloutServer]]
CHAT = """
backend: "scripted"
input { name: "messages" data_type: TYPE_STRING dims: 1 }
output { name: "text_output" data_type: TYPE_STRING dims: 1 }
"""
HALF = [{"weight": 50, "for": "10m", "min_requests": 0}, {"weight": 100, "for": "1h"}]
ALL_AT_ONCE = [{"weight": 100, "for": "10m", "min_requests": 3}]


async def test_without_a_plan_a_new_version_gets_every_request_at_once(
    server: RolloutServer,
) -> None:
    await server.publish(2)
    assert await server.asked(5) == {"2"}
    assert (server.versions, server.rollouts.describe_all()) == (["2"], [])


async def test_a_new_version_gets_its_share_and_stable_the_rest(server: RolloutServer) -> None:
    await server.publish(2, steps=HALF)
    assert server.place == ("step", 50)
    assert server.versions == ["1", "2"]
    assert await server.asked(60) == {"1", "2"}
    assert await server.ask("1") == "1"


async def test_the_time_between_two_rollouts_counts_for_neither(server: RolloutServer) -> None:
    await server.publish(2, steps=HALF)
    server.tick()
    server.rollouts.abort("m", "cli")
    await server.until_versions("1")
    server.now += 3600
    await server.publish(3)
    server.tick()
    server.tick(599)
    assert server.place == ("step", 50)
    server.tick(1)
    assert server.place == ("baking", 100)


async def test_a_manual_plan_loads_the_new_version_and_gives_it_nothing(
    server: RolloutServer,
) -> None:
    await server.publish(2, start="manual")
    assert server.place == ("waiting", 0)
    assert await server.asked(20) == {"1"}
    assert await server.ask("2") == "2"
    await server.rollouts.start("m", 2, "cli")
    assert server.place == ("step", 10)


async def test_the_last_step_promotes_and_the_old_version_is_unloaded(
    server: RolloutServer,
) -> None:
    await server.publish(2, steps=ALL_AT_ONCE)
    assert server.place == ("baking", 100)
    assert await server.asked(3) == {"2"}
    server.tick()
    server.tick(600)
    assert server.place == ("promoted", 100)
    assert await server.asked(3) == {"2"}
    await server.until_versions("2")
    assert server.model("").version == "2"
    assert server.rollouts.describe("m")["stable"] == 2


async def test_a_candidate_that_fails_its_first_requests_gets_no_further_one(
    server: RolloutServer, backend: NumberedBackend
) -> None:
    backend.errors["2"] = BROKEN
    await server.publish(2, steps=ALL_AT_ONCE)
    answers = [await server.ask() for _ in range(8)]
    assert answers == ["INTERNAL"] * 5 + ["1"] * 3
    assert server.place == ("rolled_back", 0)
    assert server.rollouts.history("m")[-1].reason == "its first 5 requests have failed"
    await server.until_versions("1")
    state, reason = (await server.index())["2"]
    assert (state, reason) == ("UNAVAILABLE", "rolled back; its files have not changed since")
    assert server.dataplane.ready


async def test_a_version_that_was_rolled_back_begins_again_only_with_other_files(
    server: RolloutServer,
) -> None:
    await server.publish(2, steps=HALF)
    server.rollouts.abort("m", "cli", "not today")
    await server.until_versions("1")
    (server.folder / "m" / "config.pbtxt").touch()
    await soon(server.control.poll())
    assert (server.place, server.versions) == (("aborted", 0), ["1"])
    with pytest.raises(InferenceError, match="version 2 of model 'm' was rolled back"):
        await server.rollouts.start("m", 2, "cli")
    server.touch(2)
    await soon(server.control.poll())
    assert server.place == ("step", 50)


async def test_a_person_begins_a_version_again(server: RolloutServer) -> None:
    await server.publish(2, steps=HALF)
    server.rollouts.abort("m", "cli")
    await server.until_versions("1")
    members = {"steps": [{"weight": 30}, {"weight": 100}]}
    await soon(server.rollouts.start("m", 2, "cli", members=members, again=True))
    assert (server.place, server.versions) == (("step", 30), ["1", "2"])
    states = [each.state for each in server.rollouts.history("m")]
    assert states == ["step", "aborted", "step"]


async def test_a_load_that_fails_ends_the_rollout_before_any_traffic(
    server: RolloutServer, backend: NumberedBackend
) -> None:
    backend.refusals["2"] = InferenceError(Code.INTERNAL, "no weights")
    await server.publish(2, steps=ALL_AT_ONCE)
    assert server.place == ("rolled_back", 0)
    assert "no weights" in server.rollouts.history("m")[-1].reason
    assert (await server.asked(3), server.versions) == ({"1"}, ["1"])
    backend.refusals.clear()
    server.touch(2)
    await soon(server.control.poll())
    assert server.place == ("baking", 100)


async def test_a_newer_version_supersedes_a_rollout_and_begins_from_stable(
    server: RolloutServer,
) -> None:
    await server.publish(2, steps=HALF)
    await server.publish(3)
    assert server.place == ("step", 50)
    assert await server.asked(60) == {"1", "3"}
    await server.until_versions("1", "3")
    states = [each.state for each in server.rollouts.history("m")]
    assert states == ["step", "superseded", "step"]


async def test_new_files_of_the_candidate_begin_its_rollout_anew(server: RolloutServer) -> None:
    await server.publish(2, steps=HALF)
    server.tick(500)
    server.touch(2)
    await soon(server.control.poll())
    assert [each.state for each in server.rollouts.history("m")] == ["step", "superseded", "step"]
    assert server.rollouts.describe("m")["spent_secs"] == 0


async def test_new_files_of_stable_begin_the_evidence_anew(server: RolloutServer) -> None:
    (server.folder / "m" / "1" / "weights").write_text("1")
    await soon(server.control.poll())
    await server.publish(2, steps=HALF)
    server.tick()
    server.tick(500)
    assert server.rollouts.describe("m")["spent_secs"] == 500
    server.touch(1)
    await soon(server.control.poll())
    assert (server.place, server.versions) == (("step", 50), ["1", "2"])
    assert server.rollouts.describe("m")["spent_secs"] == 0
    assert await server.asked(60) == {"1", "2"}


async def test_a_candidate_answers_while_stable_is_dead(
    server: RolloutServer, backend: NumberedBackend
) -> None:
    await server.publish(2, steps=[{"weight": 0, "for": "10m"}, {"weight": 100}])
    assert await server.asked(5) == {"1"}
    backend.instances["1"].die()
    await settle()
    server.tick()
    assert server.place == ("paused", 0)
    assert "version 1 (stable) is not able" in server.rollouts.history("m")[-1].reason
    assert await server.asked(5) == {"2"}


async def test_a_request_of_a_key_keeps_its_version(server: RolloutServer) -> None:
    await server.publish(2, steps=HALF, key=["parameter:user"])
    by_user = {
        user: await server.asked(5, parameters={"user": f"user-{user}"}) for user in range(20)
    }
    assert {len(versions) for versions in by_user.values()} == {1}
    assert set().union(*by_user.values()) == {"1", "2"}


async def test_transitions_are_in_the_history(server: RolloutServer) -> None:
    await server.publish(2, steps=HALF)
    server.rollouts.pause("m", "api:10.0.0.7", "lunch")
    server.rollouts.resume("m", "cli")
    assert [each.by for each in server.rollouts.history("m")] == ["server", "api:10.0.0.7", "cli"]
    assert [each.state for each in server.rollouts.history("m")] == ["step", "paused", "step"]
    assert all(each.time for each in server.rollouts.history("m"))


async def test_operations_that_do_not_fit_are_refused(server: RolloutServer) -> None:
    with pytest.raises(InferenceError, match="model 'n' is not loaded"):
        server.rollouts.describe("n")
    with pytest.raises(InferenceError, match="model 'm' has no rollout"):
        server.rollouts.pause("m", "cli")
    with pytest.raises(InferenceError, match="model 'm' has no version 7, it has 1"):
        await server.rollouts.start("m", 7, "cli")
    with pytest.raises(InferenceError, match="version 1 of model 'm' is stable already"):
        await server.rollouts.start("m", 1, "cli")
    await server.publish(2, steps=HALF)
    with pytest.raises(InferenceError, match=r"has a rollout of version 2 \(step\)"):
        await server.rollouts.start("m", 2, "cli")
    server.rollouts.abort("m", "cli")
    with pytest.raises(InferenceError, match="steps is 0, expected 1 to 100 steps"):
        await server.rollouts.start("m", 2, "cli", members={"steps": []}, again=True)


async def test_a_plan_that_is_wrong_refuses_new_versions_with_its_reason(
    server: RolloutServer,
) -> None:
    await server.publish(2, stepz=[])
    state, reason = (await server.index())["2"]
    assert state == "UNAVAILABLE"
    assert reason == (
        "rollout.json: Object contains unknown field `stepz`, expected one of steps, start, key, "
        "guardrails, prove, alpha, on_breach, on_silence, max_wait, labels, shadow_in_flight, "
        "shadow_side_effects, interrupt"
    )
    assert (await server.asked(3), server.dataplane.ready) == ({"1"}, True)


async def test_a_state_directory_of_another_process_refuses_new_versions(
    server: RolloutServer, tmp_path: Path
) -> None:
    with StateDirectory(tmp_path / "state") as other:
        other.require()
        (tmp_path / "state" / "rollouts" / ".pid").write_text("4711")
        await server.publish(2, steps=HALF)
        reason = (await server.index())["2"][1]
    assert reason == "process 4711 has the state directory (--state-directory)"
    assert await server.asked(3) == {"1"}


async def test_a_file_in_place_of_the_state_directory_refuses_new_versions(
    server: RolloutServer, tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("")
    await server.publish(2, steps=HALF)
    assert "the state directory takes no files" in (await server.index())["2"][1]
    assert await server.asked(3) == {"1"}


async def test_labels_of_the_plan_name_versions(server: RolloutServer) -> None:
    await server.publish(2, steps=HALF, labels={"champion": 1})
    labels = server.control.registry.named("m")[0].labels
    assert labels == {"stable": 1, "canary": 2, "champion": 1}


async def test_an_unload_ends_the_rollout(server: RolloutServer) -> None:
    await server.publish(2, steps=HALF)
    known = server.control.registry.named("m")[0]
    (server.folder / "m").rename(server.folder.parent / "gone")
    await soon(server.control.poll())
    assert server.place == ("aborted", 0)
    assert (known.labels, known.held) == ({}, frozenset())
    assert json.dumps(server.rollouts.describe("m"))


async def test_a_shadow_step_copies_requests_and_counts_the_copies(server: RolloutServer) -> None:
    shadow = {"shadow": 100, "for": "10m", "min_requests": 3}
    await server.publish(2, steps=[shadow, {"weight": 100, "min_requests": 0}])
    assert await server.asked(4) == {"1"}
    await settle()
    server.tick()
    assert server.rollouts.describe("m")["requests"] == 4
    assert server.model("2").statistics.success.count == 0
    server.tick(600)
    assert server.place == ("baking", 100)


async def test_a_change_of_the_plan_loads_nothing(
    server: RolloutServer, backend: NumberedBackend
) -> None:
    await server.publish(2, steps=HALF)
    before = dict(backend.instances)
    server.plan(steps=ALL_AT_ONCE)
    await soon(server.control.poll())
    assert backend.instances == before
    assert server.place == ("step", 50)


async def test_time_passes_while_the_server_runs(server: RolloutServer) -> None:
    await server.publish(2, steps=[{"weight": 100, "for": "1m", "min_requests": 0}])
    for _ in range(TURNS):
        server.now += 1
        server.control.registry.notify()
        await asyncio.sleep(0.001)
        if server.place[0] == "promoted":
            break
    assert server.place == ("promoted", 100)
    assert server.now >= 1060


@pytest.mark.parametrize(("end", "version"), [("promote", "2"), ("abort", "1")])
async def test_conversations_continue_with_the_version_that_is_left(
    starting: Starting, tmp_path: Path, end: str, version: str
) -> None:
    write(tmp_path / "models", "m", 1, text=CHAT)
    server = await starting()
    write(tmp_path / "models", "m", 2, text=CHAT)
    server.plan(steps=HALF)
    await soon(server.control.poll())
    first = await server.say(1, start=True), await server.say(2, start=True)
    assert [await server.say(number) for number in (1, 2)] == list(first)
    getattr(server.rollouts, end)("m", "cli")
    assert {await server.say(number) for number in (1, 2)} == {version}
    await server.until_versions(version)
    assert {await server.say(number) for number in (1, 2)} == {version}


async def test_each_transition_is_in_the_audit_log(
    tmp_path: Path, backend: NumberedBackend
) -> None:
    write(tmp_path / "models", "m", 1)
    audit = AuditLog(tmp_path / "audit.jsonl")
    audit.open()
    server = RolloutServer(tmp_path / "models", tmp_path / "state", backend, audit)
    await server.start()
    await server.publish(2, steps=HALF)
    server.rollouts.abort("m", "api:10.0.0.7", "too slow")
    await server.until_versions("1")
    await server.stop()
    audit.close()
    lines = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
    found = [{key: line[key] for key in ("action", "by", "to", "weight")} for line in lines]
    assert found == [
        {"action": "rollout-step", "by": "server", "to": 2, "weight": "50"},
        {"action": "rollout-aborted", "by": "api:10.0.0.7", "to": 2, "weight": "0"},
    ]
