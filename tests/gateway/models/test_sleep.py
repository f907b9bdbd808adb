"""Instances that nap instead of being closed."""

import asyncio
from pathlib import Path

import pytest

from gateway.backend import Instance
from gateway.errors import InferenceError
from gateway.models.instance_groups import InstanceSlot
from gateway.models.sleep import load_spares
from tests.builders import ScriptedInstance, read_all, soon
from tests.gateway.models.golden.files import CAPITAL, write_golden
from tests.gateway.models.lifecycles import NO_WEIGHTS
from tests.gateway.models.sleeping import answered, ask, eventually, given, loaded, stages
from tests.registries import ScriptedBackend, Start, write


class Nap:
    """The sleep of an instance that is not closed; `fails` in one of its calls."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self._fails = fails

    async def sleep(self) -> None:
        self._note("sleep")

    async def wake(self) -> None:
        self._note("wake")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self._fails:
            raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("fails", "calls"), [("", ["sleep", "wake"]), ("sleep", ["sleep"]), ("wake", ["sleep", "wake"])]
)
async def test_an_instance_that_can_nap_is_closed_only_if_it_fails_to(
    tmp_path: Path, backend: ScriptedBackend, start: Start, fails: str, calls: list[str]
) -> None:
    nap, loads = Nap(fails), 2 if fails else 1
    more = given(residency="on_demand", keep_alive_secs=0, sleep="level_1")
    write(tmp_path, "a", 1, more=more)
    write(tmp_path, "b", 1)
    control = await start()
    stream = ask(control, "a")
    instance = await loaded(backend, "a")
    instance.sleeper = nap
    (await instance.begun()).finish("a")
    assert await soon(read_all(stream)) == ["a"]
    await eventually(lambda: stages(control) == {"a": "asleep"})
    await answered(backend, control, "a", nth=loads - 1)
    assert nap.calls[: len(calls)] == calls
    assert len(backend.instances["a 1"]) == loads
    stream = ask(control, "b")
    (await backend.instances["b 1"][0].begun()).finish("b")
    assert await soon(read_all(stream)) == ["b"]


async def test_once_a_wake_has_failed_no_instance_of_the_model_naps() -> None:
    async def load() -> Instance:
        raise NO_WEIGHTS

    instances = [ScriptedInstance(), ScriptedInstance()]
    slots = [InstanceSlot(load, napping=each) for each in instances]
    for each, nap in zip(instances, (Nap("wake"), Nap()), strict=True):
        each.sleeper = nap
    with pytest.raises(InferenceError, match="no weights"):
        await soon(load_spares(slots, side_by_side=False))
    assert [slot.napping for slot in slots] == [None, None]
    assert [each.closes for each in instances] == [1, 1]


@pytest.mark.parametrize("text", ["Paris", "Lyon"])
async def test_an_instance_that_loads_its_weights_again_answers_a_golden_request_or_is_closed(
    tmp_path: Path, backend: ScriptedBackend, start: Start, text: str
) -> None:
    more = given(residency="on_demand", keep_alive_secs=0, sleep="level_2")
    write(tmp_path, "a", 1, more=more)
    for name in ("capital", "further"):
        write_golden(tmp_path / "a", name, CAPITAL)
    starting = asyncio.create_task(start())
    instance = await loaded(backend, "a")
    instance.sleeper = Nap()
    for _ in range(2):
        (await instance.begun()).finish("Paris")
    control = await soon(starting)
    await eventually(lambda: stages(control) == {"a": "asleep"})
    stream = ask(control, "a")
    (await instance.begun()).finish(text)
    answering = instance if text == "Paris" else await loaded(backend, "a", 1)
    (await answering.begun()).finish("answer")
    assert await soon(read_all(stream)) == ["answer"]
    assert instance.closes == (text != "Paris")
    assert len(instance.asked) == (4 if text == "Paris" else 3)
