"""Ensembles of a registry."""

from typing import Any

from gateway.errors import Code, InferenceError
from gateway.models.repository_control import RepositoryControl
from gateway.settings import ControlMode
from tests.builders import ScriptedInstance, read_all, soon, text_request
from tests.registries import CONFIG, ScriptedBackend

EXPLICIT: dict[str, Any] = {"control_mode": ControlMode.EXPLICIT}


NO_WEIGHTS = InferenceError(Code.INTERNAL, "no weights")


INT_TEXT = CONFIG.replace("TYPE_STRING", "TYPE_INT32").format(backend="scripted", more="")


def chain(*names: str, more: str = "", version: int = -1) -> str:
    """The config of an ensemble that calls these models one after the other."""
    tensors = ["text_input", *(f"t{number}" for number in range(1, len(names))), "text_output"]
    steps = "".join(
        f"""step {{ model_name: "{name}" model_version: {version}
            input_map {{ key: "text_input" value: "{tensors[number]}" }}
            output_map {{ key: "text_output" value: "{tensors[number + 1]}" }} }}
        """
        for number, name in enumerate(names)
    )
    return f"""
        platform: "ensemble"
        input {{ name: "text_input" data_type: TYPE_STRING dims: 1 }}
        output {{ name: "text_output" data_type: TYPE_STRING dims: 1 }}
        ensemble_scheduling {{ {steps} }}
        {more}
    """


def names(control: RepositoryControl) -> list[str]:
    return [model.name for model in control.registry.models()]


async def states(control: RepositoryControl, *wanted: str) -> dict[str, tuple[str, str]]:
    """State and reason of each, or of those that are wanted."""
    rows = {row.name: (row.state, row.reason) for row in await control.index()}
    return {name: rows[name] for name in wanted or rows}


async def answer(control: RepositoryControl, name: str, *instances: ScriptedInstance) -> list[str]:
    """Ask a model; the instances answer in turn, each with one letter more."""
    with control.registry.find(name, "").submit(text_request("x", model=name)) as stream:
        for number, instance in enumerate(instances, 1):
            (await instance.begun()).finish("x" * (number + 1))
        return await soon(read_all(stream))


def only(backend: ScriptedBackend, name: str) -> ScriptedInstance:
    return backend.instances[f"{name} 1"][-1]
