"""Models are loaded concurrently, fail separately, and are found by name and version."""

import asyncio
from pathlib import Path

import pytest

from gateway.errors import Code, InferenceError
from gateway.models.repository_control import RepositoryControl
from tests.builders import read_all, soon, text_request
from tests.gateway.models.sleeping import eventually
from tests.registries import ALL_VERSIONS, ScriptedBackend, Start, write


def refusal(control: RepositoryControl, name: str, version: str = "") -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        control.registry.find(name, version)
    return caught.value.code, caught.value.message


# Loading.


async def test_every_model_of_the_repository_is_loaded(tmp_path: Path, start: Start) -> None:
    write(tmp_path, "b", 1)
    write(tmp_path, "a", 1, 2, more=ALL_VERSIONS)
    control = await start()
    assert [(m.name, m.version) for m in control.registry.models()] == [
        ("a", "1"),
        ("a", "2"),
        ("b", "1"),
    ]
    assert control.registry.settled
    assert control.registry.failures() == {}


async def test_an_empty_repository_is_settled(start: Start) -> None:
    control = await start()
    assert control.registry.settled
    assert list(control.registry.models()) == []


async def test_models_are_loaded_side_by_side_as_many_as_there_are_threads(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path, name, 1)
    backend.gate = asyncio.Semaphore(0)
    control = await start(settled=False, load_thread_count=2)
    under_way = {await soon(backend.loading.get()), await soon(backend.loading.get())}
    assert len(under_way) == 2
    assert backend.loading.empty()
    backend.gate.release()
    third = await soon(backend.loading.get())
    assert under_way | {third} == {"a 1", "b 1", "c 1"}
    assert not control.registry.settled
    backend.gate.release()
    backend.gate.release()
    await soon(control.registry.wait_settled())
    assert len(list(control.registry.models())) == 3


async def test_a_model_serves_while_others_still_load(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    write(tmp_path, "b", 1)
    backend.gate = asyncio.Semaphore(0)
    control = await start(settled=False, load_thread_count=1)
    first = (await soon(backend.loading.get())).split()[0]
    backend.gate.release()
    second = (await soon(backend.loading.get())).split()[0]
    await eventually(lambda: [each.name for each in control.registry.models()] == [first])
    with control.registry.find(first, "").submit(text_request()) as stream:
        (await backend.instances[f"{first} 1"][0].begun()).finish("early")
        assert await soon(read_all(stream)) == ["early"]
    assert refusal(control, second) == (
        Code.UNAVAILABLE,
        f"Request for unknown model: '{second}' is still loading",
    )
    assert not control.registry.settled
    backend.gate.release()
    await soon(control.registry.wait_settled())


async def test_every_instance_of_the_groups_is_loaded(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more="instance_group { count: 2 kind: KIND_CPU }")
    control = await start()
    assert len(tuple(control.registry.find("a", "").instances)) == 2
    assert len(backend.instances["a 1"]) == 2


UNREADABLE = {
    "text that is no config": {"text": "no_such_field: 1"},
    "another name": {"more": 'name: "other"'},
    "an unsupported field": {"more": "ensemble_scheduling { step { model_name: 'x' } }"},
}
UNLOADABLE = {
    "bytes that are no text": {"text": 'backend: "\x00"'},
    "an unknown backend": {"backend": "no_such_backend"},
    "a limit that is no number": {
        "more": "parameters { key: 'max_in_flight' value { string_value: 'many' } }"
    },
}
BAD_CONFIGS = {
    **{f"unreadable: {what}": (bad, "is not found") for what, bad in UNREADABLE.items()},
    **{what: (bad, "has no available versions") for what, bad in UNLOADABLE.items()},
}


@pytest.mark.parametrize(("bad", "refused"), BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
async def test_one_invalid_config_does_not_affect_other_models(
    tmp_path: Path, start: Start, bad: dict[str, str], refused: str
) -> None:
    write(tmp_path, "good", 1)
    write(tmp_path, "bad", 1, **bad)
    control = await start()
    assert control.registry.find("good", "").ready
    (trouble,) = control.registry.failures().items()
    assert trouble[0].startswith("bad")
    assert trouble[1]
    code, text = refusal(control, "bad")
    assert code is Code.NOT_FOUND
    assert text == f"Request for unknown model: 'bad' {refused}"


async def test_a_model_without_versions_does_not_affect_other_models(
    tmp_path: Path, start: Start
) -> None:
    write(tmp_path, "good", 1)
    write(tmp_path, "bad")
    control = await start()
    assert control.registry.find("good", "").ready
    assert list(control.registry.failures()) == ["bad"]
    assert refusal(control, "bad") == (
        Code.NOT_FOUND,
        "Request for unknown model: 'bad' has no available versions",
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InferenceError(Code.UNAVAILABLE, "no memory"), "Unavailable: no memory"),
        (
            RuntimeError("/secret/path"),
            "Internal: loading failed unexpectedly; the server's log says why",
        ),
    ],
)
@pytest.mark.parametrize("where", ["complete bad", "bad 1"])
async def test_an_exception_of_a_backend_does_not_affect_other_models(
    tmp_path: Path,
    start: Start,
    backend: ScriptedBackend,
    where: str,
    error: Exception,
    reason: str,
) -> None:
    write(tmp_path, "good", 1)
    write(tmp_path, "bad", 1)
    backend.errors[where] = error
    control = await start()
    assert control.registry.find("good", "").ready
    assert control.registry.failures() == {"bad version 1": reason}


async def test_versions_load_as_one(tmp_path: Path, start: Start, backend: ScriptedBackend) -> None:
    write(tmp_path, "a", 1, 2, more=ALL_VERSIONS)
    backend.errors["a 2"] = InferenceError(Code.INTERNAL, "broken weights")
    control = await start()
    assert control.registry.failures() == {"a version 2": "Internal: broken weights"}
    assert [each.reason for each in await control.index()] == [
        "unloaded",
        "Internal: broken weights",
    ]
    assert refusal(control, "a") == (
        Code.NOT_FOUND,
        "Request for unknown model: 'a' has no available versions",
    )
    for version in ("1", "2"):
        assert refusal(control, "a", version) == (
            Code.UNAVAILABLE,
            f"Request for unknown model: 'a' version {version} is not at ready state",
        )


async def test_a_second_instance_that_fails_takes_the_first_along(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more="instance_group { count: 2 kind: KIND_CPU }")
    backend.errors["a 1 again"] = InferenceError(Code.INTERNAL, "no room for two")
    control = await start()
    assert control.registry.failures() == {"a version 1": "Internal: no room for two"}
    assert [instance.closes for instance in backend.instances["a 1"]] == [1]


async def test_a_config_that_no_model_can_have_loads_nothing(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    more = "parameters { key: 'restart_tries' value { string_value: '-1' } }"
    write(tmp_path, "a", 1, more=more)
    control = await start()
    assert "restart_tries" in control.registry.failures()["a version 1"]
    assert backend.instances == {}


# Looking up (protocol, HTTP routes: model lookup failures).


@pytest.mark.parametrize(
    ("name", "version", "code", "text"),
    [
        ("x", "", Code.NOT_FOUND, "Request for unknown model: 'x' is not found"),
        ("x", "1", Code.NOT_FOUND, "Request for unknown model: 'x' is not found"),
        ("a", "7", Code.NOT_FOUND, "Request for unknown model: 'a' version 7 is not found"),
        ("a", "0", Code.NOT_FOUND, "Request for unknown model: 'a' version 0 is not found"),
        (
            "a",
            "abc",
            Code.INVALID_ARG,
            "failed to get model version from specified version string 'abc' (details: stol), "
            "version should be an integral value > 0",
        ),
        (
            "a",
            "9223372036854775808",
            Code.INVALID_ARG,
            "failed to get model version from specified version string '9223372036854775808' "
            "(details: stol), version should be an integral value > 0",
        ),
        (
            "a",
            "-1",
            Code.INVALID_ARG,
            "invalid model version specified '-1' , version should be an integral value > 0",
        ),
    ],
)
async def test_what_is_not_there_is_refused_in_tritons_words(
    tmp_path: Path, start: Start, name: str, version: str, code: Code, text: str
) -> None:
    write(tmp_path, "a", 1)
    assert refusal(await start(), name, version) == (code, text)


async def test_without_a_version_the_highest_is_found(tmp_path: Path, start: Start) -> None:
    write(tmp_path, "a", 2, 10, 9, more=ALL_VERSIONS)
    control = await start()
    assert control.registry.find("a", "").version == "10"
    assert control.registry.find("a", "2").version == "2"
    assert [model.version for model in control.registry.ready_versions("a")] == ["2", "9", "10"]


async def test_an_unknown_model_is_unavailable_while_the_server_starts(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    backend.gate = asyncio.Semaphore(0)
    control = await start(settled=False)
    assert refusal(control, "a") == (Code.UNAVAILABLE, "Server not ready")
    await soon(backend.loading.get())
    backend.gate.release()
    await soon(control.registry.wait_settled())
    assert control.registry.find("a", "").ready


# Living.


async def test_settling_is_a_change(tmp_path: Path, start: Start, backend: ScriptedBackend) -> None:
    write(tmp_path, "a", 1)
    backend.gate = asyncio.Semaphore(0)
    control = await start(settled=False)
    await soon(backend.loading.get())
    backend.gate.release()
    while not control.registry.settled:
        await soon(control.registry.changed())


async def test_the_death_of_an_instance_is_a_change_and_a_failure(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    more = "parameters { key: 'restart_tries' value { string_value: '0' } }"
    write(tmp_path, "a", 1, more=more)
    control = await start()
    changed = asyncio.create_task(control.registry.changed())
    await asyncio.sleep(0)
    backend.instances["a 1"][0].die("killed")
    await soon(changed)
    assert control.registry.failures()["a version 1"].startswith("killed")
    assert control.registry.ready_versions("a") == []


async def test_requests_of_all_models_are_counted_drained_and_abandoned(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    write(tmp_path, "b", 1)
    control = await start()
    await soon(control.loaded.drained())
    with (
        control.registry.find("a", "").submit(text_request()) as first,
        control.registry.find("b", "").submit(text_request()) as second,
    ):
        execution = await backend.instances["a 1"][0].begun()
        await backend.instances["b 1"][0].begun()
        assert control.loaded.in_flight == 2
        drained = asyncio.create_task(control.loaded.drained())
        execution.finish("done")
        assert await soon(read_all(first)) == ["done"]
        await asyncio.sleep(0)
        assert (control.loaded.in_flight, drained.done()) == (1, False)
        control.loaded.abandon(InferenceError(Code.UNAVAILABLE, "shutting down"))
        await soon(drained)
        with pytest.raises(InferenceError, match="shutting down"):
            await soon(read_all(second))
    assert control.loaded.in_flight == 0


async def test_stopping_while_models_load_closes_what_was_loaded(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more="instance_group { count: 2 kind: KIND_CPU }")
    backend.gate = asyncio.Semaphore(1)
    await start(settled=False)
    await soon(backend.loading.get())
    await soon(backend.loading.get())  # the second waits at the gate when the control stops
