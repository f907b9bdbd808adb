"""The context of each instance, and its preparation."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.backend import Instance
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models import instances as instances_module
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.scheduler import DirectScheduler
from gateway.settings import ControlMode, ResourceLimit
from tests.builders import WAIT_SECS, ScriptedInstance, read_all, settle, soon, text_request
from tests.registries import ScriptedBackend, Start, write

PASSIVE = "instance_group { kind: KIND_CPU passive: true }"
ACTIVE = "instance_group { kind: KIND_CPU count: 2 }"
COLD = InferenceError(Code.INTERNAL, "failed to run warmup sample 'zeros'")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Instance]]:
    """The warm-up of each instance before its model serves."""
    found: list[tuple[str, Instance]] = []

    async def warm_up(
        instance: Instance,
        name: str,
        config: ModelConfig,
        folder: Path,
        statistics: ModelStatistics,
    ) -> None:
        assert config.name == folder.name == "a"
        assert name.startswith("a_")
        found.append(("warm up", instance))

    class Prepared:
        async def prepare(self, instance: Instance) -> None:
            found.append(("prepare", instance))

    monkeypatch.setattr(instances_module, "warm_up", warm_up)
    monkeypatch.setattr(DirectScheduler, "preparation", Prepared())
    return found


def done(instances: Sequence[Instance]) -> list[tuple[str, Instance]]:
    return [(step, each) for each in instances for step in ("warm up", "prepare")]


async def test_each_instance_knows_its_name_its_group_and_its_folder(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 3, more='instance_group { name: "g" count: 2 } instance_group { }')
    await start()
    contexts = backend.contexts["a 3"]
    assert [each.name for each in contexts] == ["g_0", "g_1", "a_1_0"]
    assert [each.group.name for each in contexts] == ["g", "g", "a_1"]
    assert {(each.device, each.path) for each in contexts} == {(0, tmp_path / "a" / "3")}


async def test_requests_to_other_models_are_counted(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = await start()
    (context,) = backend.contexts["a 1"]
    with pytest.raises(AssertionError):
        context.infer(text_request())
    assert control.registry.find("a", "").statistics.calls == 1


async def test_instances_are_warmed_up_and_then_shown_to_the_scheduler(
    tmp_path: Path, start: Start, backend: ScriptedBackend, steps: list[tuple[str, Instance]]
) -> None:
    write(tmp_path, "a", 1, more=PASSIVE + ACTIVE)
    control = await start()
    passive, *active = backend.instances["a 1"]
    assert steps == done(active)
    model = control.registry.find("a", "")
    assert list(model.instances) == [passive, *active]
    with model.submit(text_request()) as stream:
        (await active[0].begun()).finish("hi")
        assert await soon(read_all(stream)) == ["hi"]
    assert passive.executions == []


async def test_a_restarted_instance_is_made_as_ready_as_the_first(
    tmp_path: Path,
    start: Start,
    backend: ScriptedBackend,
    steps: list[tuple[str, Instance]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instances_module, "FIRST_BACKOFF_SECS", 0.0)
    write(tmp_path, "a", 1)
    control = await start()
    backend.instances["a 1"][0].die("killed")
    async with asyncio.timeout(WAIT_SECS):
        while len(backend.instances["a 1"]) < 2 or not control.registry.find("a", "").ready:
            await control.registry.changed()
    assert steps == done(backend.instances["a 1"])


async def test_what_cannot_be_warmed_up_is_not_served(
    tmp_path: Path, start: Start, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def warm_up(*_: object) -> None:
        raise COLD

    monkeypatch.setattr(instances_module, "warm_up", warm_up)
    write(tmp_path, "a", 1, more=ACTIVE)
    control = await start()
    assert control.registry.failures() == {"a version 1": COLD.reason}
    assert [each.closes for each in backend.instances["a 1"]] == [1, 1]


async def test_an_instance_with_a_method_that_the_seam_no_longer_has_fails_its_load(
    tmp_path: Path, start: Start, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedInstance, "left", lambda *_: None, raising=False)
    write(tmp_path, "a", 1)
    control = await start()
    (reason,) = control.registry.failures().values()
    assert "'tests.builders.ScriptedInstance' has the method 'left'" in reason
    assert reason.endswith("; subscribe to the 'cancellation' of a request instead")
    assert [each.closes for each in backend.instances["a 1"]] == [1]


async def test_a_model_of_passive_instances_is_ready_and_takes_no_request(
    tmp_path: Path, start: Start
) -> None:
    write(tmp_path, "a", 1, more=PASSIVE)
    control = await start()
    model = control.registry.find("a", "")
    assert model.ready
    assert control.registry.failures() == {}
    with pytest.raises(InferenceError) as caught:
        model.submit(text_request())
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.message == "model 'a' is unavailable: all of its instances are passive"


async def test_without_auto_complete_no_backend_is_asked(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    backend.errors["complete a"] = InferenceError(Code.INTERNAL, "was asked")
    write(tmp_path, "a", 1)
    control = await start(auto_complete=False)
    assert control.registry.find("a", "").ready
    other = await start()
    assert other.registry.failures() == {"a version 1": "Internal: was asked"}


async def test_labels_and_the_time_it_took_are_kept_with_the_model(
    tmp_path: Path, start: Start
) -> None:
    write(tmp_path, "a", 1)
    config = (tmp_path / "a" / "config.pbtxt").read_text()
    labelled = config.replace('"text_output"', '"text_output" label_filename: "names"')
    (tmp_path / "a" / "config.pbtxt").write_text(labelled)
    (tmp_path / "a" / "names").write_text("cat\ndog\n")
    model = (await start()).registry.find("a", "")
    assert model.labels == {"text_output": ("cat", "dog")}
    assert 0 < model.load_secs < 60


def needing(name: str, count: int, instances: int = 1) -> str:
    """An instance group whose executions need `count` of a resource."""
    resource = f'resources {{ name: "{name}" count: {count} global: true }}'
    return f"instance_group {{ kind: KIND_CPU count: {instances} rate_limiter {{ {resource} }} }}\n"


async def test_models_that_need_the_same_resource_take_turns(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more=needing("R", 1))
    write(tmp_path, "b", 1, more=needing("R", 1))
    control = await start(rate_limit=True)
    (first,), (second,) = backend.instances["a 1"], backend.instances["b 1"]
    with control.registry.find("a", "").submit(text_request()) as one:
        execution = await first.begun()
        with control.registry.find("b", "").submit(text_request()) as other:
            await settle()
            assert second.executions == []
            execution.finish("first")
            assert await soon(read_all(one)) == ["first"]
            (await second.begun()).finish("second")
            assert await soon(read_all(other)) == ["second"]


async def test_unless_it_is_switched_on_resources_mean_nothing(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more=needing("R", 1, instances=2))
    control = await start(resource_limits=(ResourceLimit("R", 0),))
    model = control.registry.find("a", "")
    with model.submit(text_request()), model.submit(text_request()):
        for instance in backend.instances["a 1"]:
            (await instance.begun()).finish("at once")


async def test_a_model_that_could_never_execute_is_not_loaded(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more=needing("R", 2))
    control = await start(rate_limit=True, resource_limits=(ResourceLimit("R", 1),))
    assert control.registry.failures() == {
        "a version 1": 'Invalid argument: Resource count for "R" is limited to 1 which will '
        "prevent scheduling of one or more model instances, the minimum required count is 2"
    }
    assert backend.instances == {}


async def test_what_is_available_is_reckoned_anew_when_models_change(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    explicit = {"rate_limit": True, "control_mode": ControlMode.EXPLICIT, "startup": ("*",)}
    write(tmp_path, "a", 1, more=needing("R", 1, instances=2))
    write(tmp_path, "b", 1, more=needing("R", 2))
    control = await start(**explicit)
    first, second = backend.instances["a 1"]
    model = control.registry.find("a", "")
    with model.submit(text_request()), model.submit(text_request()):
        (await first.begun()).finish("both")
        (await second.begun()).finish("both")
        await settle()
    await control.unload("b")
    await soon(closed(backend.instances["b 1"][0]))
    with model.submit(text_request()) as one, model.submit(text_request()) as other:
        execution = await first.begun()
        await settle()
        assert len(second.executions) == 1
        execution.finish("one")
        await soon(read_all(one))
        (await second.begun()).finish("after the other")
        await soon(read_all(other))
    write(tmp_path, "a", more=needing("R", 3))  # an update in place
    await control.load("a")
    assert control.registry.find("a", "") is model
    with model.submit(text_request()) as stream:
        (await backend.instances["a 1"][-1].begun()).finish("with three")
        assert await soon(read_all(stream)) == ["with three"]
    await soon(closed(first))
    await soon(closed(second))


async def closed(instance: ScriptedInstance) -> None:
    await instance.closed.wait()
    await settle()
