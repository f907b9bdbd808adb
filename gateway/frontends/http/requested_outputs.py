"""Which outputs a request asks for, and in which form each is to be sent."""

from collections.abc import Mapping
from dataclasses import field

from gateway.errors import Code, InferenceError
from gateway.frontends.http import members
from gateway.frontends.http.infer_inputs import read_region
from gateway.frontends.http.members import Members
from gateway.messages import NO_PARAMETERS, RequestedOutput, SharedRegion
from gateway.shared_memory.regions import SharedMemory
from gateway.value import value


@value
class OutputForms:
    """The outputs that are asked for, by name; none means all of them.

    `binary` has the form of each one listed; `default` is the form of the others. `only_binary`
    if all are to go behind the JSON, and as the model gives them.
    """

    default: bool = False
    listed: Mapping[str, RequestedOutput] = field(default_factory=lambda: NO_PARAMETERS)
    binary: Mapping[str, bool] = field(default_factory=lambda: NO_PARAMETERS)
    only_binary: bool = False

    def wants(self, name: str) -> bool:
        """Whether that output is asked for."""
        return not self.listed or name in self.listed

    def is_binary(self, name: str) -> bool:
        """Whether that output goes behind the JSON rather than into it."""
        return self.binary.get(name, self.default)


def read_outputs(
    found: Members, shared_memory: SharedMemory, *, default: bool
) -> tuple[tuple[RequestedOutput, ...], OutputForms]:
    """The member `outputs` of a request, which may lack it; `default` for those it does not list.

    InferenceError with Triton's texts. A region is located here, so that it stays.
    """
    if not found.get("outputs", ()):
        if "outputs" in found:
            members.array(found, "outputs")
        return (), OutputForms(default, only_binary=default)
    listed: dict[str, RequestedOutput] = {}
    binary: dict[str, bool] = {}
    for each in members.array(found, "outputs"):
        name = members.string(members.of(each), "name")
        parameters = members.parameters(each)
        wants_binary = "binary_data" in parameters and members.boolean(parameters, "binary_data")
        # Of outputs with one name Triton serves the first, in its form.
        listed.setdefault(name, _output(name, parameters, shared_memory))
        binary.setdefault(name, wants_binary)
    outputs = tuple(listed.values())
    only_binary = all(binary.values()) and not any(each.classes or each.region for each in outputs)
    return outputs, OutputForms(default, listed, binary, only_binary)


def _output(name: str, parameters: Members, shared_memory: SharedMemory) -> RequestedOutput:
    if not parameters:
        return RequestedOutput(name)
    classes = _classes(parameters)
    return RequestedOutput(name, classes, _region(parameters, shared_memory, classes))


def _classes(parameters: Members) -> int:
    found = parameters.get("classification", 0)
    if type(found) is int and found >= 0:
        return found
    raise InferenceError(
        Code.INTERNAL,
        "Unable to set 'classification': attempt to access JSON non-unsigned-integer as "
        "unsigned-integer",
    )


def _region(parameters: Members, shared_memory: SharedMemory, classes: int) -> SharedRegion | None:
    if "shared_memory_region" not in parameters:
        return None
    if classes:
        raise _exclusive("classification")
    if parameters.get("binary_data"):
        raise _exclusive("binary_data")
    return shared_memory.locate(read_region(parameters))


def _exclusive(other: str) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG, f"Output can't set both 'shared_memory_region' and '{other}'"
    )
