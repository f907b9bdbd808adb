"""The processors of instances, and that their threads keep to them."""

import asyncio
import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest

from backends.onnxruntime.parameters import PINNING, CorePin, CorePins
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from tests import onnx_models
from tests.backends.onnxruntime.conftest import backend
from tests.builders import WAIT_SECS, soon
from tests.serving import wait_until
from tests.tensor_backends import Load, context

MACHINE = frozenset({1, 3, 5, 7})


def config(**parameters: str) -> ModelConfig:
    return ModelConfig(name="m", parameters=parameters)


PINNED = config(cpu_pinning="1")
ONE_THREAD = config(cpu_pinning="1", intra_op_thread_count="1")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(MACHINE))


def taken(pins: CorePins, threads: int = 1) -> frozenset[int]:
    pin = pins.take(PINNED, threads)
    assert pin is not None
    return pin.processors


@pytest.mark.usefixtures("machine")
def test_instances_take_the_processors_with_the_fewest() -> None:
    pins = CorePins()
    assert [taken(pins) for _ in range(5)] == [{7}, {5}, {3}, {1}, {7}]
    assert taken(pins, 2) == {3, 5}


@pytest.mark.usefixtures("machine")
def test_no_instance_takes_more_than_there_are() -> None:
    assert taken(CorePins(), 9) == MACHINE


@pytest.mark.usefixtures("machine")
def test_released_cores_are_taken_again() -> None:
    pins = CorePins()
    first = pins.take(PINNED, 3)
    assert first is not None
    assert taken(pins) == {1}
    first.end()
    assert taken(pins, 3) == {3, 5, 7}


@pytest.mark.parametrize("parameters", [{}, {PINNING: "0"}, {PINNING: "false"}])
def test_it_has_to_be_asked_for(parameters: dict[str, str]) -> None:
    assert CorePins().take(config(**parameters), 1) is None


def test_a_switch_that_is_none_is_refused() -> None:
    with pytest.raises(InferenceError, match=PINNING) as caught:
        CorePins().take(config(cpu_pinning="2"), 1)
    assert caught.value.code == Code.INVALID_ARG


def test_a_system_that_cannot_bind_threads_serves_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    assert CorePins().take(PINNED, 1) is None
    assert "threads cannot be kept to processors here" in caplog.text


def test_a_block_is_bound_and_its_threads_stay_bound() -> None:
    before = os.sched_getaffinity(0)
    pin = CorePins().take(PINNED, 1)
    assert pin is not None
    with pin.kept():
        assert os.sched_getaffinity(0) == pin.processors
        inside = affinity_of_a_new_thread()
    assert inside == pin.processors
    assert os.sched_getaffinity(0) == before


def affinity_of_a_new_thread() -> set[int]:
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return found[0]


def own() -> str:
    return str(threading.get_native_id())


def affinities() -> dict[str, set[int]]:
    """Of each thread of this process, by its id."""
    found = {}
    for each in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # a thread of another test may end meanwhile
            found[each] = os.sched_getaffinity(int(each))
    return found


async def test_the_thread_of_an_instance_keeps_to_its_processor(load: Load) -> None:
    before = affinities()
    runtime = backend()
    for _ in before[own()]:
        await load(onnx_models.add_sub(), ONE_THREAD, on=runtime)
    kept = [each for thread, each in affinities().items() if thread not in before if len(each) == 1]
    assert {processor for each in kept for processor in each} == before[own()]
    assert affinities()[own()] == before[own()]


async def test_a_failed_load_releases_its_cores(folder: Path) -> None:
    runtime, last = backend(), max(affinities()[own()])
    (folder / "model.onnx").write_bytes(b"junk")
    with pytest.raises(InferenceError):
        await soon(runtime.load(context(ONE_THREAD, folder)))
    onnx_models.save(onnx_models.add_sub(), folder)
    whole = runtime.complete(replace(ONE_THREAD, name="m"), folder)
    instance = await soon(runtime.load(context(whole, folder)))
    assert {last} in affinities().values()
    await soon(instance.close())


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_an_instance_that_is_not_bound_is_released_with_its_cores(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    before, gate = set(threading.enumerate()), threading.Event()
    ended: list[CorePin] = []
    reached, loop = asyncio.Event(), asyncio.get_running_loop()

    def keep(pin: CorePin) -> None:
        if threading.current_thread().name == "m_0":
            loop.call_soon_threadsafe(reached.set)
            gate.wait(WAIT_SECS)
            raise OSError("the system refuses")

    monkeypatch.setattr(CorePin, "keep", keep)
    monkeypatch.setattr(CorePin, "end", lambda pin: ended.append(pin))
    onnx_models.save(onnx_models.add_sub(), folder)
    runtime = backend()
    whole = replace(runtime.complete(ModelConfig(name="m"), folder), parameters=PINNED.parameters)
    loading = asyncio.create_task(runtime.load(context(whole, folder)))
    await soon(reached.wait())
    if is_cancelled:
        loading.cancel()
    else:
        gate.set()
    with pytest.raises(asyncio.CancelledError if is_cancelled else OSError):
        await soon(loading)
    gate.set()
    assert len(ended) == 1

    def its_thread_has_ended() -> bool:
        return "m_0" not in {each.name for each in set(threading.enumerate()) - before}

    wait_until(its_thread_has_ended, "the thread of the instance ends")


async def test_an_instance_keeps_to_the_cores_of_its_host_policy(folder: Path) -> None:
    before, last = affinities(), max(affinities()[own()])
    onnx_models.save(onnx_models.add_sub(), folder)
    runtime = backend()
    whole = runtime.complete(ModelConfig(name="m"), folder)
    placed = replace(context(whole, folder), cpu_cores=frozenset({last}))
    instance = await soon(runtime.load(placed))
    added = [each for thread, each in affinities().items() if thread not in before]
    assert {last} in added
    assert affinities()[own()] == before[own()]
    await soon(instance.close())


async def test_cores_of_a_host_policy_need_threads_of_the_instance_s_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pool of the whole process would be there for every later test in it.
    monkeypatch.setattr(onnxruntime, "set_global_thread_pool_sizes", lambda *_: None)
    onnx_models.save(onnx_models.add_sub(), folder)
    runtime = backend(enable_global_threadpool="1")
    placed = replace(context(ModelConfig(name="m"), folder), cpu_cores=frozenset({0}))
    with pytest.raises(InferenceError, match="host policy") as caught:
        await soon(runtime.load(placed))
    assert caught.value.code is Code.UNSUPPORTED
