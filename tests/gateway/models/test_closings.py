"""Instances close concurrently, in time, and to the end."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from gateway.backend import Answer, Instance, ModelContext
from gateway.config import InstanceGroup
from gateway.messages import InferRequest, SequenceTag
from gateway.models.closings import EARLY_SECS, Closings
from gateway.models.instance_groups import (
    InPlaceUpdate,
    InstanceSlot,
    Placement,
    close_slots,
    load_slots,
)
from gateway.models.loading import Loaded, close_all
from gateway.models.model import Model
from gateway.models.repository_control import RepositoryControl
from gateway.observability.statistics import ModelStatistics
from gateway.settings import ControlMode
from tests.builders import FLAG, TEXT, ScriptedInstance, settle, soon, text_request
from tests.registries import ScriptedBackend, Start, write

SHORT_SECS = 0.05
OVERDUE = "its execution did not end in time"
SEQUENCES = """
sequence_batching {
  state { input_name: "s" output_name: "t" data_type: TYPE_INT32 dims: 1 }
}
"""
"""The executions of such a model continue after their clients have disconnected."""
WARMUP = """
model_warmup {
  name: "sample" batch_size: 1
  inputs { key: "text_input" value { data_type: TYPE_STRING dims: 1 zero_data: true } }
}
"""


class Closing(ScriptedInstance):
    """An instance that closes once a test lets it, or once it is killed."""

    def __init__(self, *, mortal: bool = True) -> None:
        super().__init__()
        self.begun_to_close = asyncio.Event()
        self.may_close = asyncio.Event()
        self.killed = ""
        self._mortal = mortal

    def kill(self, reason: str) -> None:
        self.killed = reason
        if self._mortal:
            self.may_close.set()

    async def close(self) -> None:
        self.begun_to_close.set()
        await self.may_close.wait()
        await super().close()


@pytest.fixture
async def closings() -> AsyncIterator[Closings]:
    """Closings that have ended when the test has."""
    found = Closings()
    yield found
    await soon(found.ended())


def slots(closings: Closings, *instances: ScriptedInstance) -> list[InstanceSlot]:
    async def load() -> ScriptedInstance:
        raise AssertionError("an instance was loaded")

    return [
        InstanceSlot(
            load, Placement(name=f"m_{number}", group=InstanceGroup()), each, closings=closings
        )
        for number, each in enumerate(instances)
    ]


async def test_instances_close_side_by_side(closings: Closings) -> None:
    instances = [Closing(), Closing(), Closing()]
    closing = asyncio.ensure_future(close_slots(slots(closings, *instances)))
    for each in instances:
        await soon(each.begun_to_close.wait())
    assert not closing.done()
    for each in instances:
        each.may_close.set()
    await soon(closing)
    assert [each.closes for each in instances] == [1, 1, 1]


async def cancel_throughout(task: asyncio.Task[None]) -> None:
    """Cancel a task in every turn of the loop until it has ended."""
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)


async def test_a_load_that_is_cancelled_repeatedly_keeps_no_instance(
    closings: Closings,
) -> None:
    loaded = [ScriptedInstance(), ScriptedInstance()]
    instances = iter(loaded)
    never = asyncio.Event()

    async def load() -> Instance:
        instance = next(instances, None)
        if instance is None:
            await never.wait()
            raise AssertionError("an event that is never set was set")
        return instance

    filled = [InstanceSlot(load, closings=closings) for _ in range(3)]
    loading = asyncio.create_task(load_slots(filled, side_by_side=True))
    await settle()
    await cancel_throughout(loading)
    await soon(closings.ended())
    assert [each.closes for each in loaded] == [1, 1]


async def test_loaded_versions_close_however_often_their_load_is_cancelled(
    closings: Closings,
) -> None:
    instances = [ScriptedInstance(), ScriptedInstance()]
    versions: list[Loaded] = []
    for each in instances:
        model = Model(TEXT, 1, ModelStatistics(), [])
        versions.append(InPlaceUpdate(model.exchange, TEXT, slots(closings, each), [None]))
    versions.append(Model(TEXT, 1, ModelStatistics(), slots(closings, third := ScriptedInstance())))

    closing = asyncio.create_task(close_all(versions))
    await asyncio.sleep(0)
    await cancel_throughout(closing)
    await soon(closings.ended())
    assert [each.closes for each in (*instances, third)] == [1, 1, 1]


async def test_an_instance_whose_owner_is_cancelled_still_closes(closings: Closings) -> None:
    instance = Closing()
    closing = closings.close(instance, "m_0")
    await soon(instance.begun_to_close.wait())
    closing.cancel()
    await soon(asyncio.wait([closing]))
    assert closing.cancelled()
    assert not instance.closes
    ended = asyncio.create_task(closings.ended())
    await settle()
    ended.cancel()
    await settle()
    assert not ended.done(), "cancelling the wait does not cut the closing off"
    instance.may_close.set()
    await soon(asyncio.wait([ended]))
    assert ended.cancelled()
    assert instance.closes == 1


async def test_an_instance_that_does_not_close_in_time_is_logged_and_killed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    instance, closings = Closing(), Closings(SHORT_SECS)
    await soon(closings.close(instance, "m_0"))
    assert instance.killed == "it did not close in time"
    assert instance.closes == 1
    (record,) = caplog.records
    assert (record.message, vars(record)["instance"]) == ("instance not closed in time", "m_0")


async def test_an_instance_that_cannot_be_killed_is_abandoned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.models.closings.KILLED_SECS", SHORT_SECS)
    instance, closings = Closing(mortal=False), Closings(SHORT_SECS)
    await soon(closings.close(instance, "m_0"))
    assert [each.message for each in caplog.records] == [
        "instance not closed in time",
        "instance abandoned",
    ]


async def test_the_end_of_the_server_limits_what_is_closing_already(closings: Closings) -> None:
    early, late = Closing(), Closing()
    closing = [closings.close(early, "m_0")]
    await soon(early.begun_to_close.wait())
    closings.end_by(asyncio.get_running_loop().time() + SHORT_SECS)
    closing.append(closings.close(late, "m_1"))
    await soon(asyncio.gather(*closing))
    assert early.killed
    assert late.killed


async def test_the_error_of_one_instance_does_not_affect_the_others(
    closings: Closings, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(ScriptedInstance):
        async def close(self) -> None:
            raise RuntimeError("no device")

    whole = ScriptedInstance()
    await soon(close_slots(slots(closings, Broken(), whole)))
    assert whole.closes == 1
    (record,) = caplog.records
    assert (record.message, vars(record)["instance"]) == ("instance did not close", "m_0")
    assert "no device" in str(record.exc_info)


class Execution(Closing):
    """An instance whose executions return once it is killed; one of `deaf` does not then either."""

    def __init__(self, *, deaf: bool = False) -> None:
        super().__init__()
        self.executing = asyncio.Event()
        self.returns = asyncio.Event()
        self._deaf = deaf
        self.may_close.set()

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        self.executing.set()
        try:
            await asyncio.Event().wait()
            yield 0, FLAG
        finally:
            await self.returns.wait()  # a second cancellation cuts this short

    def kill(self, reason: str) -> None:
        super().kill(reason)
        if not self._deaf:
            self.returns.set()


class ClosingBackend(ScriptedBackend):
    """Loads instances that close when a test lets them, or instances of `kind`."""

    kind: Callable[[], ScriptedInstance] = Closing

    async def load(self, context: ModelContext) -> Instance:
        loaded = self.instances.setdefault(context.config.name, [])
        loaded.append(self.kind())
        self.loading.put_nowait(context.config.name)
        return loaded[-1]


@pytest.fixture
async def backend() -> ClosingBackend:
    return ClosingBackend()


def closing_of(backend: ScriptedBackend, name: str) -> list[Closing]:
    return [each for each in backend.instances[name] if isinstance(each, Closing)]


async def test_stopping_the_server_does_not_cut_the_end_of_an_unloaded_model_off(
    tmp_path: Path, start: Start, backend: ClosingBackend
) -> None:
    write(tmp_path, "m", 1, more="instance_group { count: 3 }")
    control = await start(control_mode=ControlMode.EXPLICIT)
    await soon(control.load("m"))
    await soon(control.unload("m"))
    instances = closing_of(backend, "m")
    for each in instances:
        await soon(each.begun_to_close.wait())
    stopping = asyncio.create_task(start.stop())
    await settle()
    assert not stopping.done(), "the model is still closing"
    for each in instances:
        each.may_close.set()
    await soon(stopping)
    assert [each.closes for each in instances] == [1, 1, 1]


async def test_the_server_stops_in_time_though_instances_do_not_close(
    tmp_path: Path, start: Start, backend: ClosingBackend
) -> None:
    for name in ("a", "b"):
        write(tmp_path, name, 1, more="instance_group { count: 2 }")
    control = await start()
    control.close_by(asyncio.get_running_loop().time() + SHORT_SECS)
    await soon(start.stop())
    instances = [*closing_of(backend, "a"), *closing_of(backend, "b")]
    assert [each.killed for each in instances] == ["it did not close in time"] * 4
    assert [each.closes for each in instances] == [1] * 4


async def abandoned(control: RepositoryControl) -> Execution:
    """An instance that executes the request of a client that has disconnected."""
    model = control.registry.find("m", "")
    (instance,) = model.instances
    assert isinstance(instance, Execution)
    with model.submit(text_request(model="m", sequence=SequenceTag(1, start=True))):
        await soon(instance.executing.wait())
    return instance


async def test_the_server_stops_in_time_though_an_execution_does_not_return(
    tmp_path: Path, start: Start, backend: ClosingBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.kind = Execution
    write(tmp_path, "m", 1, more=SEQUENCES)
    control = await start()
    instance = await abandoned(control)
    stopping = asyncio.create_task(start.stop())
    await settle()
    assert not instance.killed, "it has the time of the server's exit"
    control.close_by(asyncio.get_running_loop().time() + SHORT_SECS)
    await soon(stopping)
    assert (instance.killed, instance.closes) == (OVERDUE, 1)
    assert [each.message for each in caplog.records] == ["executions not ended in time"]


async def test_only_the_instances_that_still_execute_are_killed(
    tmp_path: Path, start: Start, backend: ClosingBackend
) -> None:
    backend.kind = Execution
    write(tmp_path, "m", 1, more=f"{SEQUENCES} instance_group {{ count: 2 }}")
    control = await start()
    first, second = control.registry.find("m", "").instances
    assert isinstance(first, Execution)
    assert isinstance(second, Execution)
    with control.registry.find("m", "").submit(
        text_request(model="m", sequence=SequenceTag(1, start=True))
    ):
        await soon(first.executing.wait())
    control.close_by(asyncio.get_running_loop().time() + SHORT_SECS + EARLY_SECS)
    await soon(start.stop())
    assert [(each.killed, each.closes) for each in (first, second)] == [(OVERDUE, 1), ("", 1)]


async def test_the_server_stops_in_time_though_an_unloaded_model_still_executes(
    tmp_path: Path, start: Start, backend: ClosingBackend
) -> None:
    backend.kind = Execution
    write(tmp_path, "m", 1, more=SEQUENCES)
    control = await start(control_mode=ControlMode.EXPLICIT)
    await soon(control.load("m"))
    instance = await abandoned(control)
    await soon(control.unload("m"))
    await settle()
    control.close_by(asyncio.get_running_loop().time() + SHORT_SECS)
    await soon(start.stop())
    assert (instance.killed, instance.closes) == (OVERDUE, 1)


async def test_the_server_stops_in_time_though_a_warmup_does_not_return(
    tmp_path: Path, start: Start, backend: ClosingBackend
) -> None:
    backend.kind = Execution
    write(tmp_path, "m", 1, more=WARMUP)
    control = await start(settled=False)
    await soon(backend.loading.get())
    (instance,) = backend.instances["m"]
    assert isinstance(instance, Execution)
    await soon(instance.executing.wait())
    control.close_by(asyncio.get_running_loop().time() + SHORT_SECS)
    await soon(start.stop())
    assert (instance.killed, instance.closes) == (OVERDUE, 1)


async def test_an_execution_that_outlives_its_killed_instance_is_abandoned(
    tmp_path: Path,
    start: Start,
    backend: ClosingBackend,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.models.closings.KILLED_SECS", SHORT_SECS)
    backend.kind = partial(Execution, deaf=True)
    write(tmp_path, "m", 1, more=SEQUENCES)
    control = await start()
    instance = await abandoned(control)
    control.close_by(asyncio.get_running_loop().time() + SHORT_SECS + EARLY_SECS)
    await soon(start.stop())
    instance.returns.set()
    await settle()
    assert [each.message for each in caplog.records] == [
        "executions not ended in time",
        "executions abandoned",
    ]


@pytest.mark.parametrize("stops", [True, False])
async def test_an_execution_beyond_its_limit_is_cancelled_and_killed_if_it_does_not_stop(
    closings: Closings, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    monkeypatch.setattr("gateway.models.closings.KILLED_SECS", SHORT_SECS if not stops else 20)
    instance = Closing()

    async def execute() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if not stops:
                await instance.may_close.wait()

    assert not await soon(closings.run_within(SHORT_SECS, execute(), instance))
    assert instance.killed == ("" if stops else OVERDUE)
