"""Rollouts across restarts of the server, and damage to their state on disk."""

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.models.model_folder import Override, take_snapshot
from gateway.rollouts import saving
from gateway.rollouts.state import RolloutRecord, StateDirectory, digest
from gateway.settings import ControlMode
from tests.builders import soon
from tests.gateway.rollouts.servers import BROKEN, NumberedBackend, RolloutServer
from tests.registries import ALL_VERSIONS, write

Starting = Callable[..., Awaitable[RolloutServer]]
TEXT = '[{"name": "text_%s", "data_type": "TYPE_STRING", "dims": [1]}]'
CONFIG = f'{{"backend": "scripted", "input": {TEXT % "input"}, "output": {TEXT % "output"}}}'
HALF: list[dict[str, Any]] = [{"weight": 50, "for": "10m", "min_requests": 0}, {"weight": 100}]


def record_file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "rollouts" / "m.json"


async def test_a_server_continues_the_step_and_its_time_after_a_restart(starting: Starting) -> None:
    first = await starting()
    await first.publish(2, steps=HALF, key=["parameter:user"])
    users = [{"user": f"user-{number}"} for number in range(20)]
    before = [await first.ask(parameters=user) for user in users]
    first.tick()
    first.tick(599)
    await first.stop()
    second = await starting()
    assert (second.place, second.versions) == (("step", 50), ["1", "2"])
    assert [await second.ask(parameters=user) for user in users] == before
    second.tick()
    second.tick(1)
    assert second.place == ("baking", 100)


LEFT = {"promoted": ["2"], "rolled_back": ["1"], "aborted": ["1"]}


async def pauses(server: RolloutServer, _: NumberedBackend) -> None:
    server.rollouts.pause("m", "cli")


async def promotes(server: RolloutServer, _: NumberedBackend) -> None:
    server.rollouts.promote("m", "cli")


async def aborts(server: RolloutServer, _: NumberedBackend) -> None:
    server.rollouts.abort("m", "cli")


async def dies(server: RolloutServer, backend: NumberedBackend) -> None:
    backend.errors["2"] = BROKEN
    await server.asked(40)


@pytest.mark.parametrize(
    ("plan", "change", "state"),
    [
        ({"start": "manual"}, None, "waiting"),
        ({"steps": HALF}, None, "step"),
        ({"steps": HALF}, pauses, "paused"),
        ({"steps": [{"weight": 100, "for": "1h"}]}, None, "baking"),
        ({"steps": HALF}, promotes, "promoted"),
        ({"steps": HALF}, dies, "rolled_back"),
        ({"steps": HALF}, aborts, "aborted"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
async def test_a_killed_server_is_followed_by_one_in_the_same_state(
    starting: Starting,
    backend: NumberedBackend,
    tmp_path: Path,
    plan: dict[str, Any],
    change: Callable[[RolloutServer, NumberedBackend], Awaitable[None]] | None,
    state: str,
) -> None:
    killed = await starting()
    await killed.publish(2, **plan)
    if change is not None:
        await change(killed, backend)
    file = record_file(tmp_path)
    text = f'"state":"{state}"'
    await killed.eventually(lambda: file.exists() and text in file.read_text())
    shutil.copytree(file.parent, tmp_path / "left" / "rollouts")
    second = await starting(state="left")
    assert (second.place, second.versions) == (killed.place, LEFT.get(state, ["1", "2"]))
    answers = {0: {"1"}, 50: {"1", "2"}, 100: {"2"}}[int(second.place[1])]
    assert await second.asked(40) == answers


async def test_a_paused_rollout_stays_paused(starting: Starting) -> None:
    first = await starting()
    await first.publish(2, steps=HALF)
    first.rollouts.set_weight("m", 20, "cli", "look first")
    await first.stop()
    second = await starting()
    assert second.place == ("paused", 20)
    assert second.rollouts.history("m")[-1].reason == "look first"


async def test_a_version_that_was_rolled_back_is_not_loaded_again(starting: Starting) -> None:
    first = await starting()
    await first.publish(2, steps=HALF)
    first.rollouts.abort("m", "cli")
    await first.stop()
    second = await starting()
    assert (second.versions, await second.ask()) == (["1"], "1")


async def test_a_version_that_is_new_at_the_start_begins_a_rollout(starting: Starting) -> None:
    first = await starting()
    first.plan(steps=HALF)
    (first.folder / "m" / "config.pbtxt").touch()
    await soon(first.control.poll())
    await first.stop()
    write(first.folder, "m", 2)
    second = await starting()
    assert (second.place, second.versions) == (("step", 50), ["1", "2"])


async def test_a_candidate_that_does_not_load_at_the_start_leaves_stable_serving(
    starting: Starting, backend: NumberedBackend
) -> None:
    first = await starting()
    await first.publish(2, steps=HALF)
    await first.stop()
    backend.refusals["2"] = InferenceError(Code.INTERNAL, "no weights")
    second = await starting()
    assert (second.place, second.versions) == (("rolled_back", 0), ["1"])
    assert await second.ask() == "1"


async def test_files_that_changed_while_the_server_was_down_begin_anew(
    starting: Starting,
) -> None:
    first = await starting()
    await first.publish(2, steps=HALF)
    first.rollouts.set_weight("m", 20, "cli")
    await first.stop()
    first.touch(2)
    second = await starting()
    assert second.place == ("step", 50)
    states = [each.state for each in second.rollouts.history("m")]
    assert states == ["step", "paused", "superseded", "step"]


async def test_a_torn_state_file_makes_the_second_highest_version_stable_and_pauses(
    starting: Starting, tmp_path: Path
) -> None:
    first = await starting()
    await first.publish(2, steps=HALF)
    await first.stop()
    file = record_file(tmp_path)
    torn = file.read_bytes()[:-20]
    file.write_bytes(torn)
    second = await starting()
    assert (second.place, second.versions) == (("paused", 0), ["1", "2"])
    assert await second.asked(5) == {"1"}
    assert file.with_name("m.json.damaged").read_bytes() == torn
    second.rollouts.resume("m", "cli")
    assert second.place == ("step", 50)


async def test_a_torn_file_of_labels_begins_no_rollout(
    starting: Starting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "models", "m", 1, 2, more=ALL_VERSIONS)
    first = await starting()
    first.dataplane.set_labels("m", {"champion": 1})
    await first.stop()
    file = record_file(tmp_path)
    file.write_bytes(file.read_bytes()[:-20])
    second = await starting()
    assert "rollout state damaged" in caplog.messages
    assert (second.rollouts.describe_all(), second.dataplane.labels("m")) == ([], {})
    assert await second.ask() == "2"


async def test_the_state_is_private_and_whole(starting: Starting, tmp_path: Path) -> None:
    first = await starting()
    await first.publish(2, steps=HALF)
    await first.stop()
    file = record_file(tmp_path)
    found = json.loads(file.read_text())
    snapshot = take_snapshot(first.folder / "m")
    assert found["stamps"] == {"1": digest(snapshot, 1), "2": digest(snapshot, 2)}
    assert (found["rollout"]["state"], found["format"]) == ("step", 1)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in file.parent.iterdir() if each.suffix == ".new"] == []


async def test_labels_of_clients_are_set_again_by_the_next_server(
    starting: Starting, tmp_path: Path
) -> None:
    write(tmp_path / "models", "m", 1, 2, more=ALL_VERSIONS)
    first = await starting()
    first.dataplane.set_labels("m", {"champion": 1, "old": 2, "best": 2})
    first.dataplane.set_labels("m", {"old": None})
    await first.stop()
    second = await starting()
    assert second.dataplane.labels("m") == {"best": 2, "champion": 1}
    assert await second.ask("champion") == "1"
    second.dataplane.set_labels("m", {"best": 1})
    await second.stop()
    third = await starting()
    assert third.dataplane.labels("m") == {"best": 1, "champion": 1}


async def test_a_label_is_on_disk_before_a_server_is_killed(
    starting: Starting, tmp_path: Path
) -> None:
    killed = await starting()
    killed.dataplane.set_labels("m", {"champion": 1})
    file = record_file(tmp_path)
    text = '"labels":{"champion":1}'
    await killed.eventually(lambda: file.exists() and text in file.read_text())
    shutil.copytree(file.parent, tmp_path / "left" / "rollouts")
    second = await starting(state="left")
    assert second.dataplane.labels("m") == {"champion": 1}


async def test_labels_of_versions_that_are_gone_are_dropped_at_the_start(
    starting: Starting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "models", "m", 1, 2, more=ALL_VERSIONS)
    first = await starting()
    first.dataplane.set_labels("m", {"champion": 1, "best": 2})
    await first.stop()
    shutil.rmtree(first.folder / "m" / "1")
    for _ in range(2):
        server = await starting()
        assert server.dataplane.labels("m") == {"best": 2}
        await server.stop()
    (line,) = (each for each in caplog.records if each.message.startswith("label dropped"))
    assert vars(line).items() >= {"model": "m", "label": "champion", "version": 1}.items()


async def test_a_label_of_a_version_that_is_not_loaded_is_set_again(
    starting: Starting, tmp_path: Path
) -> None:
    write(tmp_path / "models", "m", 1, 2, more=ALL_VERSIONS)
    first = await starting()
    first.dataplane.set_labels("m", {"champion": 1})
    await first.stop()
    write(tmp_path / "models", "m", 1, 2)
    second = await starting()
    assert (second.versions, second.dataplane.labels("m")) == (["2"], {"champion": 1})
    with pytest.raises(InferenceError, match="is version 1, which is not loaded"):
        second.dataplane.model("m", "champion")


async def test_the_state_of_another_server_is_not_overwritten_and_read_at_the_next_load(
    starting: Starting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers overlap: the second one has read it before the last write of the first."""
    monkeypatch.setattr(saving, "SAVE_SECS", 0.02)
    first = await starting()
    await first.publish(2, steps=HALF)
    first.rollouts.promote("m", "cli")
    await first.until_versions("2")
    file = record_file(tmp_path)
    await first.eventually(lambda: file.exists() and '"promoted"' in file.read_text())
    second = await starting()
    await first.publish(3)
    first.rollouts.abort("m", "cli", "3 is bad")
    await first.until_versions("2")
    second.dataplane.set_labels("m", {"champion": 2})
    await first.stop()
    left = file.read_bytes()
    assert list(json.loads(left)["bad"]) == ["3"]
    (model,) = second.rollouts._models.values()  # noqa: SLF001 - nothing else shows it
    await second.eventually(lambda: model.unreadable)
    assert file.read_bytes() == left
    second.touch(2)
    await second.control.poll()
    assert (second.versions, second.dataplane.labels("m").get("champion")) == (["2"], 2)
    second.dataplane.set_labels("m", {"best": 2})
    await second.stop()
    assert list(json.loads(file.read_text())["bad"]) == ["3"]
    assert json.loads(file.read_text())["labels"] == {"best": 2}


async def test_an_upload_drops_no_label(starting: Starting, tmp_path: Path) -> None:
    write(tmp_path / "models", "m", 1, 2, more=ALL_VERSIONS)
    first = await starting()
    first.dataplane.set_labels("m", {"champion": 2})
    await first.stop()
    second = await starting(control_mode=ControlMode.EXPLICIT)
    uploaded = Override(config=CONFIG, files={"1/model.bin": b"x"})
    await second.control.load("m", uploaded)
    assert second.dataplane.labels("m") == {}
    await second.control.unload("m")
    await second.control.load("m")
    assert second.dataplane.labels("m") == {"champion": 2}


async def test_labels_of_the_plan_come_before_those_of_clients(
    starting: Starting, tmp_path: Path
) -> None:
    write(tmp_path / "models", "m", 1, 2, more=ALL_VERSIONS)
    first = await starting()
    first.plan(labels={"champion": 2})
    first.dataplane.set_labels("m", {"champion": 1, "best": 1})
    await first.stop()
    second = await starting()
    assert second.dataplane.labels("m") == {"best": 1, "champion": 2, "stable": 2}


async def test_a_server_without_a_place_for_state_keeps_no_labels(
    starting: Starting, caplog: pytest.LogCaptureFixture
) -> None:
    first = await starting(state=None)
    first.dataplane.set_labels("m", {"champion": 1})
    await first.stop()
    second = await starting(state=None)
    assert second.dataplane.labels("m") == {}
    assert "rollout state not written" not in caplog.messages


async def test_a_server_without_plans_writes_no_state(starting: Starting, tmp_path: Path) -> None:
    first = await starting()
    await first.publish(2)
    await first.stop()
    assert not (tmp_path / "state").exists()


def test_one_process_at_a_time_has_the_state_directory(tmp_path: Path) -> None:
    with StateDirectory(tmp_path) as first, StateDirectory(tmp_path) as second:
        first.require()
        with pytest.raises(InferenceError, match=r"process \d+ has the state directory"):
            second.require()
        first.close()
        second.require()
        with pytest.raises(InferenceError, match="Server exiting"):
            first.require()
        first.write("m", b"too late")
        assert not (tmp_path / "rollouts" / "m.json").exists()


def test_records_are_replaced_and_have_safe_names(tmp_path: Path) -> None:
    record = b'{"model":"a/../b"}'
    with StateDirectory(tmp_path) as state:
        assert state.read("a/../b") is None
        state.write("a/../b", b'{"model":"old"}')
        state.write("a/../b", record, 2)
        state.write("a/../b", b"late", 1)
        assert state.read("a/../b") == RolloutRecord(model="a/../b")
        state.write("x" * 255, b'{"model":"%b"}' % (b"x" * 255))
        assert state.read("x" * 255) is not None
    assert {each.parent for each in tmp_path.rglob("*.json")} == {tmp_path / "rollouts"}


@pytest.mark.parametrize("text", [b"", b"{", b'{"model": 3}', b"[]"], ids=range(4))
def test_a_damaged_record_is_moved_aside(tmp_path: Path, text: bytes) -> None:
    with StateDirectory(tmp_path) as state:
        state.write("m", text)
        with pytest.raises(ValueError, match=r"\S"):
            state.read("m")
        assert state.read("m") is None
    assert (tmp_path / "rollouts" / "m.json.damaged").read_bytes() == text


def test_a_record_of_another_format_is_left_alone(tmp_path: Path) -> None:
    with StateDirectory(tmp_path) as state:
        state.write("m", b'{"model":"m","format":2}')
        with pytest.raises(InferenceError, match="has format 2, expected 1"):
            state.read("m")


async def test_a_server_leaves_a_record_of_another_format_alone(
    starting: Starting, tmp_path: Path
) -> None:
    newer = b'{"model":"m","format":2}'
    with StateDirectory(tmp_path / "state") as state:
        state.write("m", newer)
    server = await starting()
    await server.publish(2, steps=HALF)
    assert (await server.index())["2"][1].startswith("the state of 'm' has format 2, expected 1")
    with pytest.raises(InferenceError, match="the state of 'm' has format 2"):
        await server.rollouts.start("m", 2, "cli")
    await server.stop()
    assert record_file(tmp_path).read_bytes() == newer


def test_a_server_without_a_place_for_state_says_so() -> None:
    with pytest.raises(InferenceError, match=r"there is no state directory \(--state-directory\)"):
        StateDirectory(None).require()
