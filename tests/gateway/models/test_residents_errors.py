"""Changes of models in memory that end with an error that is not foreseen."""

from pathlib import Path

import pytest

from gateway.memory_settings import ModelMemory
from gateway.models.memory import LoadMeasures
from tests.builders import read_all, soon
from tests.gateway.models.sleeping import answered, ask, failure, stages
from tests.registries import ScriptedBackend, Start, write

ON_DEMAND = ModelMemory(on_demand=True)


async def unforeseen(*_: object) -> object:
    raise ValueError("unforeseen")


async def test_a_wake_that_ends_so_before_the_load_ends_the_requests_of_its_model_only(
    tmp_path: Path, backend: ScriptedBackend, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a", 1)
    write(tmp_path, "b", 1)
    control = await start(memory=ON_DEMAND)
    with monkeypatch.context() as broken:
        broken.setattr(LoadMeasures, "begin", unforeseen)
        error = await failure(ask(control, "a"))
    assert error.message == (
        "model 'a' could not be loaded into memory: an unforeseen error; the server's log has it"
    )
    for name in "ba":
        await answered(backend, control, name)


async def test_a_wake_that_ends_so_after_the_load_has_its_model_awake(
    tmp_path: Path, backend: ScriptedBackend, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a", 1)
    control = await start(memory=ON_DEMAND)
    with monkeypatch.context() as broken:
        broken.setattr(LoadMeasures, "end", unforeseen)
        await answered(backend, control, "a")
    assert stages(control) == {"a": "awake"}
    stream, (instance,) = ask(control, "a"), backend.instances["a 1"]
    (await instance.begun()).finish("again")
    assert await soon(read_all(stream)) == ["again"]
