"""Changes of a rollout or its model while its versions are being loaded or unloaded."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.models.loading import ModelLoader
from gateway.models.repository import Override
from gateway.settings import ControlMode
from tests.builders import soon
from tests.gateway.rollouts.servers import BROKEN, NumberedBackend, RolloutServer
from tests.registries import write

HALF: list[dict[str, Any]] = [{"weight": 50, "for": "10m"}, {"weight": 100}]
OWN: dict[str, Any] = {"steps": [{"weight": 30}, {"weight": 100}]}
BOTH = ["1", "2"]
CONFIG_OF_1 = """{"backend": "scripted", "version_policy": {"specific": {"versions": [1]}},
  "input": [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}],
  "output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]}]}"""
LABELS = {"stable": 1, "canary": 2}


class HeldLoads:
    """The loads of versions, which wait from `hold` on until `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._gate = asyncio.Event(), asyncio.Event()
        self._gate.set()
        load_versions = ModelLoader.load_versions

        async def held(loader: ModelLoader, *args: Any) -> Mapping[int, Any]:
            self.begun.set()
            await self._gate.wait()
            return await load_versions(loader, *args)

        monkeypatch.setattr(ModelLoader, "load_versions", held)

    def hold(self) -> None:
        """Hold the next load."""
        self.begun.clear()
        self._gate.clear()

    def release(self) -> None:
        """Let all loads continue."""
        self._gate.set()


@pytest.fixture
async def loads(monkeypatch: pytest.MonkeyPatch) -> HeldLoads:
    return HeldLoads(monkeypatch)


@pytest.fixture
async def explicit(starting: Callable[..., Awaitable[RolloutServer]]) -> RolloutServer:
    """A server of version 1, whose folder has version 2, too, and no plan."""
    server = await starting(control_mode=ControlMode.EXPLICIT)
    await server.control.load("m")
    write(server.folder, "m", 2)
    return server


def start(server: RolloutServer, version: int = 2) -> asyncio.Task[None]:
    """A start of a rollout with members of its own."""
    began = server.rollouts.start("m", version, "ann", members=OWN, again=True)
    return asyncio.create_task(began)


async def passing() -> None:
    """Time for a start to wait for a load that is held."""
    await asyncio.sleep(0.1)


async def behind_a_load(
    server: RolloutServer, loads: HeldLoads
) -> tuple[asyncio.Task[None], asyncio.Task[None]]:
    """A load that is held, and a start of a version that has come to the disk meanwhile."""
    (server.folder / "m" / "2").rmdir()
    (server.folder / "m" / "1" / "weights").write_text("new")
    loads.hold()
    load = asyncio.create_task(server.control.load("m"))
    await soon(loads.begun.wait())
    write(server.folder, "m", 2)
    begun = start(server)
    await passing()
    return load, begun


async def starting_held(server: RolloutServer, loads: HeldLoads) -> asyncio.Task[None]:
    """A start whose load is held."""
    loads.hold()
    begun = start(server)
    await soon(loads.begun.wait())
    return begun


@pytest.mark.parametrize("end", ["abort", "promote"])
async def test_a_start_while_a_version_is_being_unloaded_loads_it_again(
    explicit: RolloutServer, loads: HeldLoads, end: str
) -> None:
    await explicit.rollouts.start("m", 2, "ann")
    loads.hold()
    getattr(explicit.rollouts, end)("m", "ann")
    await soon(loads.begun.wait())
    stable, candidate = (1, 2) if end == "abort" else (2, 1)
    begun = start(explicit, candidate)
    await passing()
    loads.release()
    await soon(begun)
    assert (explicit.place, explicit.versions) == (("step", 30), BOTH)
    labels = explicit.control.registry.named("m")[0].labels
    assert labels == {"stable": stable, "canary": candidate}
    assert await explicit.asked(80) == {"1", "2"}
    await passing()
    assert (explicit.place, explicit.versions) == (("step", 30), BOTH)


async def test_a_start_of_a_version_that_is_new_on_disk_outlives_the_unload_of_another(
    explicit: RolloutServer, loads: HeldLoads
) -> None:
    await explicit.rollouts.start("m", 2, "ann")
    write(explicit.folder, "m", 3)
    explicit.rollouts.abort("m", "ann")
    await soon(start(explicit, 3))
    await passing()
    assert (explicit.place, explicit.versions) == (("step", 30), ["1", "3"])
    states = [each.state for each in explicit.rollouts.history("m")]
    assert states == ["step", "aborted", "step"]


async def test_a_start_waits_for_a_load_of_the_model(
    explicit: RolloutServer, loads: HeldLoads
) -> None:
    load, begun = await behind_a_load(explicit, loads)
    loads.release()
    await soon(asyncio.gather(load, begun))
    assert (explicit.place, explicit.versions) == (("step", 30), BOTH)


async def test_of_two_starts_at_once_one_begins(explicit: RolloutServer) -> None:
    outcomes = await soon(asyncio.gather(start(explicit), start(explicit), return_exceptions=True))
    (refusal,) = [each for each in outcomes if each is not None]
    assert isinstance(refusal, InferenceError)
    assert refusal.code in (Code.ALREADY_EXISTS, Code.UNAVAILABLE)
    assert (explicit.place, explicit.versions) == (("step", 30), BOTH)
    assert [each.state for each in explicit.rollouts.history("m")] == ["step"]


async def test_a_change_while_a_start_loads_its_versions_is_refused(
    explicit: RolloutServer, loads: HeldLoads
) -> None:
    begun = await starting_held(explicit, loads)
    for action in explicit.rollouts.abort, explicit.rollouts.promote:
        with pytest.raises(InferenceError, match="the versions of 'm' are being loaded") as e:
            action("m", "ann")
        assert e.value.code is Code.UNAVAILABLE
    with pytest.raises(InferenceError, match="the versions of 'm' are being loaded"):
        await explicit.rollouts.start("m", 2, "ann")
    loads.release()
    await soon(begun)
    assert (explicit.place, explicit.versions) == (("step", 30), BOTH)


async def test_an_abort_while_a_newer_version_is_loaded_is_refused(
    server: RolloutServer, loads: HeldLoads
) -> None:
    await server.publish(2, steps=HALF)
    write(server.folder, "m", 3)
    loads.hold()
    polling = asyncio.create_task(server.control.poll())
    await soon(loads.begun.wait())
    with pytest.raises(InferenceError, match="the versions of 'm' are being loaded"):
        server.rollouts.abort("m", "ann")
    loads.release()
    await soon(polling)
    await server.until_versions("1", "3")
    assert server.place == ("step", 50)


async def test_a_newer_version_that_appears_during_an_abort_gets_a_rollout(
    server: RolloutServer, loads: HeldLoads
) -> None:
    await server.publish(2, steps=HALF)
    loads.hold()
    server.rollouts.abort("m", "ann")
    await soon(loads.begun.wait())
    write(server.folder, "m", 3)
    polling = asyncio.create_task(server.control.poll())
    await passing()
    loads.release()
    await soon(polling)
    assert (server.place, server.versions) == (("step", 50), ["1", "3"])
    assert await server.asked(60) == {"1", "3"}


@pytest.mark.parametrize(("end", "left"), [("abort", "1"), ("promote", "2")])
async def test_an_end_during_a_reload_leaves_one_version(
    server: RolloutServer, loads: HeldLoads, end: str, left: str
) -> None:
    await server.publish(2, steps=HALF)
    write(server.folder, "m", more="# changed\nmax_batch_size: 0")
    loads.hold()
    polling = asyncio.create_task(server.control.poll())
    await soon(loads.begun.wait())
    getattr(server.rollouts, end)("m", "ann")
    assert await server.asked(5) == {left}
    loads.release()
    await soon(polling)
    assert await server.asked(5) == {left}
    await server.until_versions(left)


async def test_an_unload_during_a_start_ends_the_rollout_with_an_error(
    explicit: RolloutServer, loads: HeldLoads
) -> None:
    begun = await starting_held(explicit, loads)
    await soon(explicit.control.unload("m"))
    with pytest.raises(InferenceError, match="unloaded while it was being loaded"):
        await begun
    assert (explicit.place, explicit.versions) == (("aborted", 0), [])


async def test_a_start_that_waits_for_an_unload_loads_nothing(
    explicit: RolloutServer, loads: HeldLoads
) -> None:
    (explicit.folder / "m" / "1" / "weights").write_text("new")
    loads.hold()
    load = asyncio.create_task(explicit.control.load("m"))
    await soon(loads.begun.wait())
    unload = asyncio.create_task(explicit.control.unload("m"))
    begun = start(explicit)
    with suppress(InferenceError):
        await soon(load)
    await soon(unload)
    with pytest.raises(InferenceError, match="model 'm' is not loaded"):
        await soon(begun)
    assert (explicit.versions, explicit.rollouts.describe_all()) == ([], [])


async def test_a_start_that_waits_for_a_load_of_a_client_s_config_is_refused(
    explicit: RolloutServer, loads: HeldLoads
) -> None:
    loads.hold()
    load = asyncio.create_task(explicit.control.load("m", Override(config=CONFIG_OF_1)))
    await soon(loads.begun.wait())
    begun = start(explicit)
    await passing()
    loads.release()
    await soon(load)
    with pytest.raises(InferenceError, match="'m' was loaded meanwhile; start the rollout again"):
        await soon(begun)
    assert explicit.rollouts.describe_all() == []


async def test_a_start_whose_stable_does_not_load_leaves_no_canary(
    explicit: RolloutServer, backend: NumberedBackend, tmp_path: Path
) -> None:
    (tmp_path / "models" / "m" / "1" / "weights").write_text("new")
    backend.refusals["1"] = BROKEN
    with pytest.raises(InferenceError, match="broken"):
        await explicit.rollouts.start("m", 2, "ann")
    assert (explicit.place, explicit.versions) == (("aborted", 0), ["1"])
    known = explicit.control.registry.named("m")[0]
    assert (known.labels, known.held) == ({"stable": 1}, frozenset({1}))
    backend.refusals.clear()
    await soon(explicit.rollouts.start("m", 2, "ann"))
    assert (explicit.place, known.labels) == (("step", 10), LABELS)


async def test_a_version_that_was_rolled_back_stays_so_after_a_failed_start(
    server: RolloutServer, backend: NumberedBackend
) -> None:
    await server.publish(2, steps=HALF)
    server.rollouts.abort("m", "ann")
    await server.until_versions("1")
    weights = server.folder / "m" / "1" / "weights"
    weights.write_text("wrong")
    backend.refusals["1"] = BROKEN
    with pytest.raises(InferenceError, match=BROKEN.message):
        await server.rollouts.start("m", 2, "ann", again=True)
    backend.refusals.clear()
    weights.write_text("right")
    await server.control.poll()
    assert server.versions == ["1"]


@pytest.mark.parametrize("is_newer", [False, True], ids=["gone", "newer"])
async def test_a_start_whose_rollout_ends_during_its_load_is_an_error(
    explicit: RolloutServer, loads: HeldLoads, *, is_newer: bool
) -> None:
    load, begun = await behind_a_load(explicit, loads)
    if is_newer:
        write(explicit.folder, "m", 3)
    else:
        shutil.rmtree(explicit.folder / "m" / "2")
    loads.release()
    await soon(load)
    with pytest.raises(InferenceError, match="version 2 of model 'm' ended during its load"):
        await soon(begun)
