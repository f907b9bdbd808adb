"""A version that fails its golden requests does not serve, and the version before serves on."""

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.messages import InferResponse
from gateway.models.golden_results import GoldenOutcome
from gateway.models.repository_control import RepositoryControl
from gateway.settings import ControlMode, GoldenMode
from gateway.tensor import Datatype, array_tensor
from tests.builders import ScriptedInstance, read_all, settle, soon, text_request
from tests.gateway.models.ensembles import chain
from tests.gateway.models.golden.files import CAPITAL, TEXT_INPUT, write_golden
from tests.gateway.models.lifecycles import EXPLICIT, answer, refusal, states
from tests.registries import ScriptedBackend, Start, write

FAILED = (
    "failed to load 'a' version 2: golden request 'capital': text does not match '(?i)paris': "
    "'Lyon is one'"
)


async def loaded(backend: ScriptedBackend, key: str) -> ScriptedInstance:
    """The latest instance of a version, once it is loaded."""
    while await soon(backend.loading.get()) != key:
        pass
    await settle()
    return backend.instances[key][-1]


async def first(control: RepositoryControl, backend: ScriptedBackend) -> ScriptedInstance:
    """The instance of version 1, which serves."""
    await soon(control.load("a"))
    return await loaded(backend, "a 1")


async def load_with(
    control: RepositoryControl, backend: ScriptedBackend, text: str
) -> asyncio.Task[None]:
    """A load of version 2, whose golden request is answered with that text."""
    load = asyncio.create_task(control.load("a"))
    instance = await loaded(backend, "a 2")
    (await instance.begun()).finish(text)
    return load


async def test_a_version_that_fails_is_refused_with_the_reason_and_the_one_before_serves(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = await start(**EXPLICIT)
    before = await first(control, backend)
    write(tmp_path, "a", 2)
    write_golden(tmp_path / "a", "capital", CAPITAL)
    load = await load_with(control, backend, "Lyon is one")
    with pytest.raises(Exception, match="load failed for model 'a'") as caught:
        await soon(load)
    assert FAILED in str(caught.value)
    assert await states(control) == [
        ("a", "1", "READY", ""),
        ("a", "2", "UNAVAILABLE", f"Invalid argument: {FAILED}"),
    ]
    assert await answer(control, before, "still here") == ["still here"]


async def test_a_version_that_passes_serves_and_nothing_is_counted(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = await start(**EXPLICIT)
    await first(control, backend)
    write(tmp_path, "a", 2)
    write_golden(tmp_path / "a", "capital", CAPITAL)
    await soon(await load_with(control, backend, "It is Paris."))
    model = control.registry.find("a", "")
    assert (model.version, model.statistics.success.count) == ("2", 0)
    assert model.statistics.execution_count == 0
    assert [(each.name, each.outcome) for each in model.golden] == [
        ("capital", GoldenOutcome.PASSED)
    ]


async def test_every_new_instance_answers_but_no_kept_version_and_no_restarted_instance(
    tmp_path: Path, start: Start, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.models.instances.FIRST_BACKOFF_SECS", 0.001)
    write(tmp_path, "a", 1, more="instance_group { kind: KIND_CPU count: 2 }")
    write_golden(tmp_path / "a", "capital", CAPITAL)
    control = await start(**EXPLICIT)
    load = asyncio.create_task(control.load("a"))
    for _ in range(2):
        await loaded(backend, "a 1")
    for instance in backend.instances["a 1"]:
        (await instance.begun()).finish("Paris")
    await soon(load)
    golden_file = tmp_path / "a" / "golden" / "capital.json"
    golden_file.write_text(golden_file.read_text().replace("paris", "rome"))
    await soon(control.load("a"))
    one, other = backend.instances["a 1"]
    one.die("gone")
    await loaded(backend, "a 1")
    assert [len(each.executions) for each in backend.instances["a 1"]] == [1, 1, 0]
    assert await answer(control, other, "hi") == ["hi"]


async def test_a_failed_version_is_polled_again_when_its_golden_requests_change(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    write_golden(tmp_path / "a", "capital", {"request": {}, "expect": {}})
    control = await start(control_mode=ControlMode.POLL)
    assert "expected inputs, text or chat" in control.registry.failures()["a version 1"]
    (tmp_path / "a" / "golden" / "capital.json").unlink()
    await soon(control.poll())
    assert control.registry.find("a", "").ready


@pytest.mark.parametrize("mode", [GoldenMode.WARN, GoldenMode.OFF])
async def test_without_strict_golden_requests_a_version_that_fails_serves(
    tmp_path: Path,
    start: Start,
    backend: ScriptedBackend,
    caplog: pytest.LogCaptureFixture,
    mode: GoldenMode,
) -> None:
    write(tmp_path, "a", 1)
    write_golden(tmp_path / "a", "capital", CAPITAL)
    control = await start(golden=mode, **EXPLICIT)
    load = asyncio.create_task(control.load("a"))
    instance = await loaded(backend, "a 1")
    if mode is GoldenMode.WARN:
        (await instance.begun()).finish("Lyon")
    await soon(load)
    warnings = [each.getMessage() for each in caplog.records if each.name == "sluice.golden"]
    assert warnings == (["golden request failed"] if mode is GoldenMode.WARN else [])
    outcomes = [each.outcome for each in control.registry.find("a", "").golden]
    assert outcomes == ([GoldenOutcome.FAILED] if mode is GoldenMode.WARN else [])


def wrong_shape(folder: Path) -> None:
    tensor = {"name": "text_input", "datatype": "BYTES", "data": ["a", "b"]}
    write_golden(folder, "g", {"request": {"inputs": [tensor]}, "expect": {"text": {"equals": ""}}})


def no_npz(folder: Path) -> None:
    tensor = {**TEXT_INPUT, "data": "npz:x"}
    write_golden(folder, "g", {"request": {"inputs": [tensor]}, "expect": {"text": {"equals": ""}}})


def pickled_npz(folder: Path) -> None:
    no_npz(folder)
    np.savez(folder / "golden" / "g.npz", x=np.array([Unpickled()], dtype=object))


def pickle_for_npz(folder: Path) -> None:
    no_npz(folder)
    (folder / "golden" / "g.npz").write_bytes(pickle.dumps(Unpickled()))


class Unpickled:
    """An object whose unpickling is code."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return eval, ("1 / 0",)


def many_files(folder: Path) -> None:
    for number in range(1001):
        write_golden(folder, f"g{number}", {})


def many_bytes(folder: Path) -> None:
    write_golden(folder, "g", CAPITAL)
    with (folder / "golden" / "g.npz").open("wb") as file:
        file.truncate(64 << 20)


def no_pattern(folder: Path) -> None:
    write_golden(folder, "g", {**CAPITAL, "expect": {"text": {"matches": "("}}})


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (wrong_shape, "golden request 'g': request: [request id: <id_unknown>] unexpected shape"),
        (no_npz, "request.inputs[0].data: is 'npz:x', but failed to open text file for read"),
        (pickled_npz, "'g.npz' cannot be read: Object arrays cannot be loaded"),
        (pickle_for_npz, "'g.npz' cannot be read: File is not a zip file"),
        (many_files, "'a/golden': has 1001 files of"),
        (many_bytes, "expected at most 1000 files of 67108864 bytes"),
        (no_pattern, "expect.text.matches: is '(', expected a regular expression"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
async def test_after_bad_files_the_version_before_serves_on(
    tmp_path: Path,
    start: Start,
    backend: ScriptedBackend,
    bad: Callable[[Path], None],
    text: str,
) -> None:
    write(tmp_path, "a", 1)
    control = await start(**EXPLICIT)
    before = await first(control, backend)
    write(tmp_path, "a", 2)
    bad(tmp_path / "a")
    assert text in await refusal(control, "a")
    assert "a 2" not in backend.instances
    assert await answer(control, before, "still here") == ["still here"]


async def test_after_a_pattern_that_explodes_the_version_before_serves_on(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = await start(**EXPLICIT)
    before = await first(control, backend)
    write(tmp_path, "a", 2)
    expect: dict[str, Any] = {"text": {"matches": "(a+)+$"}}
    write_golden(tmp_path / "a", "g", {**CAPITAL, "expect": expect})
    load = await load_with(control, backend, "a" * 60 + "!")
    assert await answer(control, before, "meanwhile") == ["meanwhile"]
    with pytest.raises(Exception, match="takes more than 1 s to search"):
        await soon(load)
    assert await answer(control, before, "still here") == ["still here"]


async def test_after_a_model_that_never_answers_the_version_before_serves_on(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = await start(**EXPLICIT)
    before = await first(control, backend)
    write(tmp_path, "a", 2)
    write_golden(tmp_path / "a", "g", {**CAPITAL, "secs": 0.02})
    load = asyncio.create_task(control.load("a"))
    instance = await loaded(backend, "a 2")
    execution = await instance.begun()
    with pytest.raises(Exception, match=r"golden request 'g': not answered within 0\.02 s"):
        await soon(load)
    assert execution.stopped.is_set()
    assert await answer(control, before, "still here") == ["still here"]


async def test_an_unload_ends_a_load_whose_golden_request_is_not_answered(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    write_golden(tmp_path / "a", "g", {**CAPITAL, "secs": 600})
    control = await start(**EXPLICIT)
    load = asyncio.create_task(control.load("a"))
    instance = await loaded(backend, "a 1")
    execution = await instance.begun()
    await soon(control.unload("a"))
    with pytest.raises(Exception, match="unloaded while it was being loaded"):
        await soon(load)
    assert execution.stopped.is_set()


async def test_an_ensemble_that_fails_keeps_its_members_until_a_member_suits_it(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    write(tmp_path, "e", 1, text=chain("a"))
    control = await start(**EXPLICIT)
    await soon(control.load("e"))
    old = await loaded(backend, "a 1")
    write_golden(tmp_path / "e", "capital", CAPITAL)
    new = await reload_member(tmp_path, control, backend, "Lyon")
    rows = {name: (state, reason) for name, _, state, reason in await states(control)}
    assert rows["e"][0] == "READY"
    assert "bound to the members before their reload" in rows["e"][1]
    assert "golden request 'capital': text does not match" in rows["e"][1]
    assert not old.closed.is_set()
    assert await asked(control, old, "the old member") == ["the old member"]
    assert len(new.executions) == 1
    newest = await reload_member(tmp_path, control, backend, "Paris")
    assert [reason for *_, reason in await states(control)] == ["", ""]
    await soon(old.closed.wait())
    assert await asked(control, newest, "the new member") == ["the new member"]
    serving = control.registry.find("e", "")
    write_golden(tmp_path / "e", "second", CAPITAL)
    await soon(control.load("e"))
    assert control.registry.find("e", "") is serving


async def test_the_members_of_an_ensemble_do_not_count_its_golden_requests(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    write(tmp_path, "e", 1, text=chain("a"))
    write_golden(tmp_path / "e", "capital", CAPITAL)
    control = await start(**EXPLICIT)
    load = asyncio.create_task(control.load("e"))
    (await (await loaded(backend, "a 1")).begun()).finish("It is Paris.")
    await soon(load)
    found = control.registry.find("a", "").statistics
    assert (found.success.count, found.inference_count, found.execution_count) == (0, 0, 0)
    assert [each.outcome for each in control.registry.find("e", "").golden] == [
        GoldenOutcome.PASSED
    ]


async def reload_member(
    folder: Path, control: RepositoryControl, backend: ScriptedBackend, text: str
) -> ScriptedInstance:
    """Load the member again; its new instance answers the ensemble's golden request."""
    parameter = f"parameters {{ key: 'answer' value {{ string_value: '{text}' }} }}"
    write(folder, "a", 1, more=parameter)
    load = asyncio.create_task(control.load("a"))
    new = await loaded(backend, "a 1")
    (await new.begun()).finish(text)
    await soon(load)
    return new


async def asked(control: RepositoryControl, member: ScriptedInstance, text: str) -> list[str]:
    """Ask the ensemble; the member answers."""
    with control.registry.find("e", "").submit(text_request(model="e")) as stream:
        (await member.begun()).finish(text)
        return await soon(read_all(stream))


EMBED = """
backend: "scripted"
input { name: "text" data_type: TYPE_STRING dims: 1 }
output { name: "vector" data_type: TYPE_FP32 dims: 2 }
"""


@pytest.mark.parametrize(("vector", "passes"), [((2.0, 0.1), True), ((1.0, 1.0), False)])
async def test_similar_texts_are_compared_by_a_loaded_model(
    tmp_path: Path,
    start: Start,
    backend: ScriptedBackend,
    vector: tuple[float, float],
    passes: bool,
) -> None:
    similar = {"to": "The capital is Paris.", "model": "embed", "min": 0.9}
    write(tmp_path, "embed", 1, text=EMBED)
    write(tmp_path, "a", 1)
    write_golden(tmp_path / "a", "g", {**CAPITAL, "expect": {"text": {"similar": similar}}})
    control = await start(startup=("embed",), **EXPLICIT)
    embed = await loaded(backend, "embed 1")
    load = asyncio.create_task(control.load("a"))
    (await (await loaded(backend, "a 1")).begun()).finish("It is Paris.")
    for each in ((1.0, 0.0), vector):
        execution = await embed.begun()
        array = np.array([each], np.float32).reshape(2)
        tensor = array_tensor("vector", Datatype.FP32, array)
        execution.answer(InferResponse(outputs=(tensor,), final=True))
        execution.end()
    outcome = (await soon(asyncio.gather(load, return_exceptions=True)))[0]
    assert embed.asked == ["The capital is Paris.", "It is Paris."]
    assert (outcome is None) is passes
    if not passes:
        assert "the similarity 0.707 to 'The capital is Paris.' by model 'embed'" in str(outcome)
