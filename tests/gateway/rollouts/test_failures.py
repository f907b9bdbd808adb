"""Rollouts whose state is not written, whose loads are interrupted, and at the server's exit."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from gateway.errors import InferenceError, exiting
from gateway.messages import SequenceTag
from gateway.rollouts import saving, state
from gateway.settings import ControlMode
from gateway.threads import MOST_REQUEST_THREADS
from tests.builders import read_all, settle, soon, text_request
from tests.gateway.rollouts.servers import BROKEN, NumberedBackend, RolloutServer
from tests.registries import ALL_VERSIONS, write

Starting = Callable[..., Awaitable[RolloutServer]]
HALF: list[dict[str, Any]] = [{"weight": 50, "for": "10m", "min_requests": 0}, {"weight": 100}]
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 3600000000 }"


def state_on_disk(tmp_path: Path) -> str:
    file = tmp_path / "state" / "rollouts" / "m.json"
    return str(json.loads(file.read_text())["rollout"]["state"]) if file.exists() else ""


def full(path: Path, data: bytes) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("exits", [False, True])
async def test_an_end_that_could_not_be_written_is_written_later(
    starting: Starting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, exits: bool
) -> None:
    server = await starting()
    await server.publish(2, steps=HALF)
    await server.eventually(lambda: state_on_disk(tmp_path) == "step")
    monkeypatch.setattr(saving, "SAVE_SECS", 600 if exits else 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(state, "_write", full)
        server.rollouts.abort("m", "ann")
        await server.until_versions("1")
        await asyncio.sleep(0.05)
    if exits:
        await server.stop()
    await server.eventually(lambda: state_on_disk(tmp_path) == "aborted")


class HangingDisk:
    """A disk whose writes hang until `ended` is set, from the block on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()
        write_now = state._write  # noqa: SLF001

        def hang(path: Path, data: bytes) -> None:
            self.begun.set()
            self.ended.wait(60)
            write_now(path, data)

        monkeypatch.setattr(state, "_write", hang)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()


async def test_a_disk_that_hangs_stops_no_judgement(
    starting: Starting, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await starting()
    await server.publish(2, steps=HALF)
    with HangingDisk(monkeypatch) as disk:
        server.rollouts.pause("m", "ann")
        await server.eventually(disk.begun.is_set)
        ticked = asyncio.Event()
        monkeypatch.setattr(server.rollouts, "tick", ticked.set)
        server.rollouts.resume("m", "ann")
        await soon(ticked.wait())


async def test_the_exit_does_not_wait_for_a_disk_that_hangs(
    starting: Starting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(saving, "LAST_SECS", 0.05)
    server = await starting()
    await server.publish(2, steps=HALF)
    with HangingDisk(monkeypatch) as disk, state.StateDirectory(tmp_path / "state") as other:
        server.rollouts.pause("m", "ann")
        await server.eventually(disk.begun.is_set)
        began = asyncio.get_running_loop().time()
        await server.stop()
        assert asyncio.get_running_loop().time() - began < 20
        assert "rollout state not written" in caplog.messages
        with pytest.raises(InferenceError, match="has the state directory"):
            other.require()
        disk.ended.set()
        await server.eventually(lambda: has(other))


def has(folder: state.StateDirectory) -> bool:
    """Whether this server can have the folder."""
    with suppress(InferenceError):
        folder.require()
    return folder.is_taken


async def test_loads_do_not_wait_for_a_disk_that_hangs(
    starting: Starting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MOST_REQUEST_THREADS):
        write(tmp_path / "models", f"m{number}", 1)
        (tmp_path / "models" / f"m{number}" / "rollout.json").write_text("{}")
    with HangingDisk(monkeypatch) as disk, monkeypatch.context() as patched:
        patched.setattr(saving, "ANSWER_SECS", 0.05)
        server = await starting()
        assert await soon(server.threads.run(str)) == ""
        await server.publish(2, steps=HALF)
        state_and_reason = (await server.index())["2"]
        assert state_and_reason == (
            "UNAVAILABLE",
            "the state directory has not answered for 0.05 s (--state-directory)",
        )
        assert (server.versions, await server.ask()) == (["1"], "1")
        disk.ended.set()
        patched.undo()
        await server.eventually(lambda: (tmp_path / "state" / "rollouts" / ".pid").exists())
        await soon(server.rollouts.start("m", 2, "ann"))
        assert server.versions == ["1", "2"]


async def test_a_state_that_was_read_too_slowly_is_read_again_at_the_next_load(
    starting: Starting, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await starting()
    first.dataplane.set_labels("m", {"champion": 1})
    await first.stop()
    ended, read = threading.Event(), state.StateDirectory.read

    def hang(self: state.StateDirectory, model: str) -> state.RolloutRecord | None:
        ended.wait(60)
        return read(self, model)

    with monkeypatch.context() as patched:
        patched.setattr(saving, "ANSWER_SECS", 0.05)
        patched.setattr(state.StateDirectory, "read", hang)
        second = await starting()
        assert second.dataplane.labels("m") == {}
        ended.set()
    (second.folder / "m" / "1" / "weights").write_text("changed")
    await second.control.poll()
    assert second.dataplane.labels("m") == {"champion": 1}
    await second.publish(2, steps=HALF)
    assert second.place == ("step", 50)


async def test_a_disk_that_hangs_has_one_call_of_each_name() -> None:
    disk, ended = saving.DiskThread("test"), threading.Event()
    calls = [disk.start("a", ended.wait, 60), disk.start("b", str)]
    waiting = [asyncio.create_task(disk.answer("b", int)) for _ in range(3)]
    await asyncio.sleep(0)
    assert disk.waits("b")
    ended.set()
    assert await soon(asyncio.gather(*waiting)) == ["", "", ""]
    assert await soon(asyncio.gather(*calls)) == [True, ""]
    assert (disk.waits("a"), disk.waits("b")) == (False, False)
    assert await soon(disk.answer("b", int)) == 0
    disk.close()


async def test_requests_that_the_exit_ends_are_no_fault_of_the_candidate(
    starting: Starting, backend: NumberedBackend
) -> None:
    server = await starting()
    await server.publish(2, steps=[{"weight": 100, "for": "10m"}])
    assert await server.ask() == "2"
    backend.gates["2"] = asyncio.Event()
    streams = [server.dataplane.infer(text_request(model="m")) for _ in range(6)]
    await settle()
    server.dataplane.refuse_requests()
    server.dataplane.abandon(exiting())
    for each in streams:
        with pytest.raises(InferenceError, match="Server exiting"):
            await soon(read_all(each))
    backend.instances["2"].die()
    await settle()
    server.tick(1)
    server.tick(61)
    await server.stop()
    backend.gates.clear()
    again = await starting()
    assert (again.place, again.versions) == (("baking", 100), ["1", "2"])
    again.tick()
    assert again.rollouts.describe("m")["requests"] == 1


async def test_a_candidate_that_has_answered_nothing_survives_the_exit(
    starting: Starting, backend: NumberedBackend
) -> None:
    server = await starting()
    await server.publish(2, steps=[{"weight": 100, "for": "10m"}])
    backend.gates["2"] = asyncio.Event()
    for _ in range(6):
        server.dataplane.infer(text_request(model="m"))
    await settle()
    server.dataplane.refuse_requests()
    server.dataplane.abandon(exiting())
    await settle()
    assert server.place == ("baking", 100)


@pytest.mark.parametrize("end", ["promote", "supersede"])
async def test_a_sequence_of_an_earlier_version_outlives_the_next_rollout(
    starting: Starting, tmp_path: Path, end: str
) -> None:
    write(tmp_path / "models", "m", 1, more=SEQUENCES)
    server = await starting()
    server.plan(steps=HALF)

    async def publish(version: int) -> None:
        write(tmp_path / "models", "m", version, more=SEQUENCES)
        await soon(server.control.poll())

    await publish(2)
    owner = "1" if end == "promote" else "2"
    server.rollouts.set_weight("m", 0 if owner == "1" else 100, "ann")
    assert await server.ask(sequence=SequenceTag(7, start=True)) == owner
    if end == "promote":
        server.rollouts.promote("m", "ann")
    await publish(3)
    versions = ["1", "2", "3"]
    assert (server.place, server.versions) == (("step", 50), versions)
    assert await server.ask(sequence=SequenceTag(7)) == owner
    chooser = server.model("3").chooser
    assert chooser is not None
    model, tap = chooser.choose(text_request(model="m", sequence=SequenceTag(7)))
    assert (model.version, tap) == (owner, None)
    assert await server.ask(sequence=SequenceTag(7, end=True)) == owner
    versions.remove(owner)
    await server.until_versions(*versions)


async def test_without_a_plan_a_newer_version_waits_for_the_sequences_of_a_promotion(
    starting: Starting, tmp_path: Path
) -> None:
    write(tmp_path / "models", "m", 1, more=SEQUENCES)
    server = await starting()
    assert await server.ask(sequence=SequenceTag(7, start=True)) == "1"
    write(tmp_path / "models", "m", 2, more=SEQUENCES)
    await server.rollouts.start("m", 2, "ann")
    server.rollouts.promote("m", "ann")
    write(tmp_path / "models", "m", 3, more=SEQUENCES)
    await soon(server.control.poll())
    assert await server.ask(sequence=SequenceTag(7)) == "1"
    assert await server.ask(sequence=SequenceTag(8, start=True, end=True)) == "2"
    assert await server.ask(sequence=SequenceTag(7, end=True)) == "1"
    await server.until_versions("3")


async def explicit(starting: Starting) -> RolloutServer:
    """A server that has loaded nothing, and whose model has a plan and two versions.

    Version 1 is stable, by a rollout of version 2 that a restart has interrupted.
    """
    first = await starting(control_mode=ControlMode.EXPLICIT)
    await first.control.load("m")
    write(first.folder, "m", 2)
    first.plan(steps=HALF)
    await first.control.load("m")
    await first.stop()
    return await starting(control_mode=ControlMode.EXPLICIT)


async def test_a_load_that_an_unload_interrupts_blames_no_version(
    starting: Starting, backend: NumberedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await explicit(starting)
    loading, load = asyncio.Event(), backend.load

    async def hang(context: Any) -> Any:
        loading.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(backend, "load", hang)
    running = asyncio.create_task(server.control.load("m"))
    await soon(loading.wait())
    await soon(server.control.unload("m"))
    with pytest.raises(InferenceError, match="unloaded while it was being loaded"):
        await running
    assert server.rollouts.history("m")[-1].reason == "the model was unloaded"
    monkeypatch.setattr(backend, "load", load)
    await soon(server.control.load("m"))
    assert (server.place, server.versions) == (("step", 50), ["1", "2"])


async def test_a_load_that_the_exit_ends_blames_no_version(
    starting: Starting, backend: NumberedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await explicit(starting)
    loading, ended = asyncio.Event(), asyncio.Event()

    async def end(context: Any) -> Any:
        loading.set()
        await ended.wait()
        raise exiting()

    monkeypatch.setattr(backend, "load", end)
    running = asyncio.create_task(server.control.load("m"))
    await soon(loading.wait())
    server.dataplane.refuse_requests()
    ended.set()
    with pytest.raises(InferenceError, match="Server exiting"):
        await running
    assert server.place == ("step", 50)


async def test_a_stable_that_does_not_load_is_no_fault_of_the_candidate(
    starting: Starting, backend: NumberedBackend
) -> None:
    server = await explicit(starting)
    backend.refusals["1"] = BROKEN
    with pytest.raises(InferenceError, match="version 1 is at UNAVAILABLE state: Internal: broken"):
        await server.control.load("m")
    backend.refusals.clear()
    await server.control.load("m")
    assert (server.place, server.versions) == (("step", 50), ["1", "2"])


async def test_a_client_loads_a_version_whose_last_load_has_failed(
    starting: Starting, backend: NumberedBackend
) -> None:
    server = await explicit(starting)
    backend.refusals["2"] = BROKEN
    await server.control.load("m")
    assert (server.place, server.versions) == (("rolled_back", 0), ["1"])
    await server.control.unload("m")
    backend.refusals.clear()
    await server.control.load("m")
    assert (server.place, server.versions) == (("step", 50), ["1", "2"])


async def test_a_rollout_whose_start_fails_is_over(starting: Starting) -> None:
    server = await starting()
    write(server.folder, "m", 2)
    config = server.folder / "m" / "config.pbtxt"
    text = config.read_text()
    config.write_text("nonsense")
    with pytest.raises(InferenceError, match="config"):
        await server.rollouts.start("m", 2, "ann")
    assert server.place == ("aborted", 0)
    config.write_text(text)
    await soon(server.rollouts.start("m", 2, "ann"))
    assert (server.place, server.versions) == (("step", 10), ["1", "2"])


async def test_a_promoted_older_version_answers_until_a_newer_one_appears(
    starting: Starting, tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        write(tmp_path / "models", "m", version, more=ALL_VERSIONS)
    server = await starting()
    await server.rollouts.start("m", 1, "ann")
    server.rollouts.promote("m", "ann")
    await server.until_versions("1", "2")
    assert await server.asked(3) == {"1"}
    await server.stop()
    server = await starting()
    assert (server.versions, await server.ask()) == (["1", "2"], "1")
    await server.control.refresh(server.control.registry.named("m")[0].id)
    assert await server.ask() == "1"
    write(tmp_path / "models", "m", 4, more=ALL_VERSIONS)
    await soon(server.control.poll())
    assert (server.versions, await server.ask()) == (["1", "2", "4"], "4")
