"""Models of scripted instances that sleep: requests for them, and waits for what becomes of it."""

import asyncio
from collections.abc import Callable

import pytest

from gateway.errors import InferenceError
from gateway.models.model import Model
from gateway.models.repository_control import RepositoryControl
from gateway.stream import ResponseStream
from tests.builders import WAIT_SECS, ScriptedInstance, read_all, soon, text_request
from tests.registries import ScriptedBackend


def given(**parameters: object) -> str:
    """Parameters of a config."""
    row = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}\n'
    return "".join(row.format(key, value) for key, value in parameters.items())


def model_of(control: RepositoryControl, name: str) -> Model:
    return control.registry.find(name, "")


def ask(control: RepositoryControl, name: str, text: str = "hello") -> ResponseStream:
    return model_of(control, name).submit(text_request(text, model=name))


async def answered(
    backend: ScriptedBackend, control: RepositoryControl, name: str, nth: int = 0
) -> None:
    """Ask a model, and have its instance answer; it is loaded for that if it is asleep."""
    with ask(control, name) as stream:
        instance = await loaded(backend, name, nth)
        (await instance.begun()).finish("answer")
        assert await soon(read_all(stream)) == ["answer"]
    await eventually(lambda: "waking" not in stages(control).values())


def stages(control: RepositoryControl) -> dict[str, str]:
    return {resident.name: resident.stage.value for resident in control.residents.models}


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, which no event tells."""
    async with asyncio.timeout(WAIT_SECS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def loaded(backend: ScriptedBackend, name: str, nth: int = 0) -> ScriptedInstance:
    """The instance that a model loads for the nth time."""
    found: list[ScriptedInstance] = backend.instances.setdefault(f"{name} 1", [])
    await eventually(lambda: len(found) > nth)
    return found[nth]


async def asleep(control: RepositoryControl, name: str) -> None:
    await eventually(lambda: model_of(control, name).instances.asleep)


async def failure(stream: ResponseStream) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        await soon(read_all(stream))
    return caught.value
