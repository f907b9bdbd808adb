"""Answers of a control, and of its models, for the tests of the lifecycle."""

from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.models.model_folder import Override
from gateway.models.repository_control import RepositoryControl
from gateway.settings import ControlMode
from tests.builders import ScriptedInstance, read_all, soon, text_request

EXPLICIT: dict[str, Any] = {"control_mode": ControlMode.EXPLICIT}
NO_WEIGHTS = InferenceError(Code.INTERNAL, "no weights")
BATCHED = (
    '{"backend": "scripted", "max_batch_size": 4, '
    '"input": [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}], '
    '"output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]}]}'
)


async def states(control: RepositoryControl) -> list[tuple[str, str, str, str]]:
    rows = await control.index()
    return [(row.name, row.version, row.state, row.reason) for row in rows]


async def refusal(control: RepositoryControl, name: str, override: Override | None = None) -> str:
    """The text of the error that a load ends with."""
    with pytest.raises(InferenceError) as caught:
        await soon(control.load(name, override))
    return caught.value.message


def lookup(control: RepositoryControl, name: str, version: str = "") -> str:
    """The reason why a request for the model is refused."""
    with pytest.raises(InferenceError) as caught:
        control.registry.find(name, version)
    return caught.value.message.removeprefix("Request for unknown model: ")


async def answer(control: RepositoryControl, instance: ScriptedInstance, text: str) -> list[str]:
    """Ask the model `a`, and have that instance answer."""
    with control.registry.find("a", "").submit(text_request()) as stream:
        (await instance.begun()).finish(text)
        return await soon(read_all(stream))
