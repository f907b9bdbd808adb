"""Models that sleep and wake for requests, with all parts of the life cycle but no real backend."""

import asyncio
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import InferenceError, RetryLater
from gateway.memory_settings import ModelMemory
from gateway.models import residence
from gateway.models.kept_facts import FactsFolder
from tests.builders import ScriptedInstance, read_all, settle, soon
from tests.gateway.models.ensembles import chain
from tests.gateway.models.lifecycles import EXPLICIT, NO_WEIGHTS, states
from tests.gateway.models.sleeping import (
    answered,
    ask,
    asleep,
    eventually,
    failure,
    given,
    loaded,
    model_of,
    stages,
)
from tests.gateway.sequences.parts import part
from tests.registries import ScriptedBackend, Start, write

ONE = ModelMemory(on_demand=True, models=1)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models may sleep at once for others, and are closed at once to requests for others."""
    monkeypatch.setattr(residence, "STAY_SECS", 0.0)
    monkeypatch.setattr(residence, "PATIENCE_SECS", 0.0)


async def test_a_model_on_demand_is_ready_and_asleep_until_a_request_wakes_it(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1, more=given(residency="on_demand"))
    write(tmp_path, "b", 1)
    control = await start()
    assert await states(control) == [("a", "1", "READY", "asleep"), ("b", "1", "READY", "")]
    assert not control.registry.failures()
    assert backend.instances.keys() == {"b 1"}
    await answered(backend, control, "a")
    assert await states(control) == [("a", "1", "READY", ""), ("b", "1", "READY", "")]


async def test_one_load_serves_all_requests_that_wait_in_their_order(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1)
    backend.gate = asyncio.Semaphore(0)
    control = await start(memory=ModelMemory(on_demand=True))
    streams = [ask(control, "a", text) for text in "abc"]
    await soon(backend.loading.get())
    streams[0].cancel()
    assert streams[1].model_at == math.inf, "no load has been timed yet"
    backend.gate.release()
    instance = await loaded(backend, "a")
    await eventually(lambda: streams[1].model_at is None)
    for text in "bc":
        (await instance.begun()).finish(text)
    assert [await soon(read_all(each)) for each in streams[1:]] == [["b"], ["c"]]
    assert instance.asked == ["b", "c"]


async def test_a_client_that_leaves_ends_its_wait_and_not_the_load(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1)
    backend.gate = asyncio.Semaphore(0)
    control = await start(memory=ModelMemory(on_demand=True))
    ask(control, "a").cancel()
    await settle()
    assert backend.loading.empty(), "no load begins for a request that is gone"
    leaving = ask(control, "a")
    await soon(backend.loading.get())
    leaving.cancel()
    backend.gate.release()
    await loaded(backend, "a")
    await answered(backend, control, "a")
    assert len(backend.instances["a 1"]) == 1


async def test_the_model_used_least_recently_sleeps_for_another_one(
    tmp_path: Path, backend: ScriptedBackend, start: Start, hurry: None
) -> None:
    for name in "abc":
        write(tmp_path, name, 1)
    control = await start(memory=ModelMemory(on_demand=True, models=2))
    for name in "abac":
        await answered(backend, control, name)
    reasons = {row[0]: row[3] for row in await states(control)}
    assert reasons == {"a": "", "b": "asleep", "c": ""}
    assert backend.instances["b 1"][0].closes == 1
    await answered(backend, control, "b", nth=1)


async def test_a_model_in_use_is_closed_to_new_requests_which_wait_for_its_next_turn(
    tmp_path: Path, backend: ScriptedBackend, start: Start, hurry: None
) -> None:
    write(tmp_path, "a", 1)
    write(tmp_path, "b", 1)
    control = await start(memory=ONE)
    first = ask(control, "a", "first")
    execution = await (await loaded(backend, "a")).begun()
    waiting = ask(control, "b")
    await asleep(control, "a")
    second = ask(control, "a", "second")
    assert not backend.instances.get("b 1"), "a is still in memory"
    execution.finish("first")
    assert await soon(read_all(first)) == ["first"]
    (await (await loaded(backend, "b")).begun()).finish("b")
    assert await soon(read_all(waiting)) == ["b"]
    (await (await loaded(backend, "a", 1)).begun()).finish("second")
    assert await soon(read_all(second)) == ["second"]


async def test_requests_that_were_queued_before_their_model_slept_wake_it_again(
    tmp_path: Path,
    backend: ScriptedBackend,
    start: Start,
    hurry: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.registries.ScriptedInstance", partial(ScriptedInstance, 1))
    write(tmp_path, "a", 1)
    write(tmp_path, "b", 1)
    control = await start(memory=ONE)
    first, second = ask(control, "a", "first"), ask(control, "a", "second")
    execution = await (await loaded(backend, "a")).begun()
    await eventually(lambda: stages(control)["a"] == "awake")
    waiting = ask(control, "b")
    await asleep(control, "a")
    execution.finish("first")
    (await (await loaded(backend, "b")).begun()).finish("b")
    (await (await loaded(backend, "a", 1)).begun()).finish("second")
    answers = [await soon(read_all(each)) for each in (first, waiting, second)]
    assert answers == [["first"], ["b"], ["second"]]


async def test_a_model_sleeps_after_its_keep_alive_time(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1, more=given(residency="on_demand", keep_alive_secs=0))
    write(tmp_path, "b", 1, more=given(residency="pinned", keep_alive_secs=0))
    control = await start()
    await answered(backend, control, "b")
    await answered(backend, control, "a")
    await asleep(control, "a")
    await answered(backend, control, "a", nth=1)
    assert not model_of(control, "b").instances.asleep


async def test_three_failed_loads_refuse_requests_with_the_reason(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1, more=given(residency="on_demand"))
    write(tmp_path, "b", 1)
    backend.errors["a 1"] = NO_WEIGHTS
    control = await start()
    for _ in range(3):
        error = await failure(ask(control, "a"))
        assert error.message == "model 'a' could not be loaded into memory: no weights"
    with pytest.raises(RetryLater, match="memory 3 times: no weights") as found:
        ask(control, "a")
    assert 50 < found.value.advice.retry_after_secs <= 60
    (stream, (instance,)) = ask(control, "b"), backend.instances["b 1"]
    (await instance.begun()).finish("b")
    assert await soon(read_all(stream)) == ["b"]


async def test_a_model_without_room_is_refused_with_those_that_are_in_memory(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1, more=given(residency="pinned", memory_mb=3 << 10))
    write(tmp_path, "b", 1, more=given(memory_mb=2 << 10))
    control = await start(memory=ModelMemory(on_demand=True, host=4 << 30))
    await answered(backend, control, "a")
    with pytest.raises(RetryLater) as found:
        ask(control, "b")
    assert found.value.message == "model 'b' is not in memory and there is no room: a (pinned)"
    await answered(backend, control, "a")


async def test_a_request_waits_for_room_no_longer_than_its_model_allows(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1, more=given(memory_mb=3 << 10))
    write(tmp_path, "b", 1, more=given(memory_mb=2 << 10, wake_secs=1))
    control = await start(memory=ModelMemory(on_demand=True, host=4 << 30))
    stream = ask(control, "a")
    execution = await (await loaded(backend, "a")).begun()
    error = await failure(ask(control, "b"))
    assert isinstance(error, RetryLater)
    assert error.message == (
        "model 'b' is not in memory and there is no room: a (3.0 GiB, 1 requests)"
    )
    execution.finish("a")
    assert await soon(read_all(stream)) == ["a"]


async def test_a_model_larger_than_the_budget_does_not_load(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1, more=given(memory_mb=5 << 10))
    write(tmp_path, "b", 1)
    control = await start(memory=ModelMemory(on_demand=True, host=4 << 30))
    (failed, _) = await states(control)
    assert "model 'a' needs 5.0 GiB of host memory, the budget is 4.0 GiB" in failed[3]
    await answered(backend, control, "b")


async def test_a_wrong_parameter_names_the_values_it_may_have(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1, more=given(residency="sometimes"))
    control = await start()
    (row,) = await states(control)
    assert row[3] == (
        "Invalid argument: model 'a': parameter 'residency' is 'sometimes', expected always or "
        "on_demand or pinned"
    )


async def test_members_of_an_ensemble_wake_one_after_the_other_within_the_budget(
    tmp_path: Path, backend: ScriptedBackend, start: Start, hurry: None
) -> None:
    write(tmp_path, "a", 1)
    write(tmp_path, "b", 1)
    write(tmp_path, "e", 1, text=chain("a", "b"))
    control = await start(memory=ONE)
    assert await states(control) == [
        ("a", "1", "READY", "asleep"),
        ("b", "1", "READY", "asleep"),
        ("e", "1", "READY", ""),
    ]
    stream = ask(control, "e")
    for name in "ab":
        (await (await loaded(backend, name)).begun()).finish(name)
    assert await soon(read_all(stream)) == ["b"]


async def test_a_member_in_use_by_an_ensemble_does_not_sleep_between_its_steps(
    tmp_path: Path,
    backend: ScriptedBackend,
    start: Start,
    hurry: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residence, "PATIENCE_SECS", 60.0)
    for name in "abc":
        write(tmp_path, name, 1)
    write(tmp_path, "e", 1, text=chain("a", "b"))
    control = await start(memory=ModelMemory(on_demand=True, models=2))
    stream = ask(control, "e")
    (await (await loaded(backend, "a")).begun()).finish("a")
    execution = await (await loaded(backend, "b")).begun()
    wanted = {"a": "awake", "b": "awake", "c": "asleep"}
    await eventually(lambda: stages(control) == wanted)
    waiting = ask(control, "c")
    await settle()
    assert stages(control) == wanted
    execution.finish("b")
    assert await soon(read_all(stream)) == ["b"]
    (await (await loaded(backend, "c")).begun()).finish("c")
    assert await soon(read_all(waiting)) == ["c"]


async def test_the_end_of_a_request_of_an_ensemble_lets_its_members_sleep_at_once(
    tmp_path: Path, backend: ScriptedBackend, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residence, "LOOK_SECS", 200.0)
    kept: list[object] = []
    monkeypatch.setattr(FactsFolder, "write", lambda *given: kept.append(given))
    write(tmp_path, "a", 1, more=given(keep_alive_secs=0))
    write(tmp_path, "b", 1)
    write(tmp_path, "inner", 1, text=chain("a", "b"))
    write(tmp_path, "e", 1, text=chain("inner", "b"))
    control = await start(memory=ModelMemory(on_demand=True))
    stream = ask(control, "e")
    (await (await loaded(backend, "a")).begun()).finish("a")
    last = await loaded(backend, "b")
    (await last.begun()).finish("b")
    execution = await last.begun()
    await eventually(lambda: len(kept) == 2)
    await settle()
    assert stages(control) == {"a": "awake", "b": "awake"}
    execution.finish("answer")
    assert await soon(read_all(stream)) == ["answer"]
    await asleep(control, "a")


async def test_a_load_request_wakes_a_model_in_advance(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1)
    control = await start(memory=ONE, startup=("a",), **EXPLICIT)
    await soon(control.load("a"))
    assert not model_of(control, "a").instances.asleep
    await soon(control.unload("a"))
    await soon(backend.instances["a 1"][0].closed.wait())
    backend.errors["a 1 again"] = NO_WEIGHTS
    with pytest.raises(InferenceError, match="'a' could not be loaded into memory: no weights"):
        await soon(control.load("a"))


async def test_requests_of_an_unloaded_model_are_answered_although_it_was_asleep(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1)
    backend.gate = asyncio.Semaphore(0)
    control = await start(memory=ONE, startup=("a",), **EXPLICIT)
    stream = ask(control, "a")
    await soon(control.unload("a"))
    backend.gate.release()
    (await (await loaded(backend, "a")).begun()).finish("a")
    assert await soon(read_all(stream)) == ["a"]


async def test_an_open_sequence_keeps_its_model_in_memory(
    tmp_path: Path,
    backend: ScriptedBackend,
    start: Start,
    hurry: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residence, "PATIENCE_SECS", 60.0)
    write(tmp_path, "a", 1, more="max_batch_size: 1 sequence_batching { }")
    write(tmp_path, "b", 1)
    control = await start(memory=ONE)
    model = model_of(control, "a")
    first = model.submit(part(1, "x", "start"))
    instance = await loaded(backend, "a")
    (await instance.begun()).finish("x")
    assert await soon(read_all(first)) == ["x"]
    await eventually(lambda: stages(control)["a"] == "awake")
    waiting = ask(control, "b")
    await settle()
    assert stages(control) == {"a": "awake", "b": "asleep"}
    last = model.submit(part(1, "y", "end"))
    (await instance.begun()).finish("y")
    assert await soon(read_all(last)) == ["y"]
    (await (await loaded(backend, "b")).begun()).finish("b")
    assert await soon(read_all(waiting)) == ["b"]


async def test_facts_of_instances_are_known_while_they_are_asleep_after_a_restart(
    tmp_path: Path, backend: ScriptedBackend, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedInstance, "max_model_len", 512)
    monkeypatch.setattr(ScriptedInstance, "adapters", ("odd",))
    repository, store = tmp_path / "models", tmp_path / "store"
    write(repository, "a", 1)
    settings: dict[str, Any] = {"memory": ONE, "store": store}
    control = await start(repository, **settings)
    assert (model_of(control, "a").max_model_len, model_of(control, "a").further_names) == (
        None,
        (),
    )
    await answered(backend, control, "a")
    await eventually(lambda: any((store / ".kept" / "residence").glob("*.json")))
    await start.stop()
    model = model_of(await start(repository, **settings), "a")
    assert model.instances.asleep
    assert (model.max_model_len, tuple(model.further_names)) == (512, ("odd",))
    assert model.load_secs > 0


async def test_other_instance_groups_load_a_model_that_may_sleep_again(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1)
    control = await start(memory=ONE, startup=("a",), **EXPLICIT)
    await answered(backend, control, "a")
    write(tmp_path, "a", more="instance_group { count: 2 kind: KIND_CPU }")
    await soon(control.load("a"))
    assert len(list(model_of(control, "a").instances)) == 2
    await soon(backend.instances["a 1"][0].closed.wait())
