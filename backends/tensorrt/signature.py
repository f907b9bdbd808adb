"""Inputs, outputs and optimization profiles of an engine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.tensor import SIZES, format_shape

Shape = tuple[int, ...]

DATA_TYPES = {
    "FLOAT": DataType.TYPE_FP32,
    "HALF": DataType.TYPE_FP16,
    "BF16": DataType.TYPE_BF16,
    "INT8": DataType.TYPE_INT8,
    "INT32": DataType.TYPE_INT32,
    "INT64": DataType.TYPE_INT64,
    "BOOL": DataType.TYPE_BOOL,
    "UINT8": DataType.TYPE_UINT8,
}
"""Data types by the names in `tensorrt.DataType`; narrow types have none in the protocol."""


@dataclass(frozen=True, slots=True)
class Binding:
    """One input or output; -1 in `dims` is any size.

    `on_host`: a shape tensor, whose values TensorRT reads and writes on the host.
    """

    name: str
    data_type: DataType
    dims: Shape
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a profile for an input: sizes of its dims, or values of a shape tensor."""

    least: Shape
    best: Shape
    most: Shape

    def allows(self, shape: Shape) -> bool:
        """Whether each dimension is in the range."""
        return len(shape) == len(self.least) and all(
            least <= size <= most
            for size, least, most in zip(shape, self.least, self.most, strict=True)
        )

    def distance(self, shape: Shape) -> int:
        """The Manhattan distance from the best shape."""
        return sum(abs(size - best) for size, best in zip(shape, self.best, strict=True))


Profile = Mapping[str, Range]
"""The ranges of one optimisation profile by the inputs' names; shape tensors are not in it."""


@dataclass(frozen=True, slots=True)
class EngineSignature:
    """All inputs and outputs by name, in the engine's order, and the profiles by their index."""

    inputs: Mapping[str, Binding]
    outputs: Mapping[str, Binding]
    profiles: Sequence[Profile]

    @classmethod
    def of(cls, engine: Any, api: Any, model: str) -> "EngineSignature":
        """Read an engine; InferenceError UNSUPPORTED for a tensor that the protocol lacks."""
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        for name in names:
            _require_servable(engine, name, api, model)
        found = {name: _binding(engine, name, api) for name in names}
        inputs = {
            name: each
            for name, each in found.items()
            if engine.get_tensor_mode(name) == api.TensorIOMode.INPUT
        }
        outputs = {name: each for name, each in found.items() if name not in inputs}
        count = engine.num_optimization_profiles
        return cls(inputs, outputs, [_profile(engine, inputs, index) for index in range(count)])

    @property
    def has_shape_tensors(self) -> bool:
        """Whether some values are read or written on the host."""
        return any(each.on_host for each in (*self.inputs.values(), *self.outputs.values()))

    def largest_batch(self, profiles: Sequence[int]) -> int:
        """The most rows that these profiles take; 0 if the engine does not batch.

        The batch is the first dimension of every input and output. With shape tensors it is
        unknown, since their values may depend on the batch.
        """
        if self.has_shape_tensors or not self.inputs:
            return 0
        found = max(self._rows(self.profiles[index]) for index in profiles)
        dynamic = any(each.dims[:1] == (-1,) for each in self.inputs.values())
        rows = -1 if dynamic else found
        return found if all(each.dims[:1] == (rows,) for each in self.outputs.values()) else 0

    def _rows(self, profile: Profile) -> int:
        return min(profile[name].most[0] if profile[name].most else 0 for name in self.inputs)


def _require_servable(engine: Any, name: str, api: Any, model: str) -> None:
    kind, layout = engine.get_tensor_dtype(name).name, engine.get_tensor_format(name)
    if kind not in DATA_TYPES:
        raise InferenceError(
            Code.UNSUPPORTED,
            f"tensor '{name}' of model '{model}' has data type {kind} in its engine; build it with "
            f"inputs and outputs of {', '.join(DATA_TYPES)}",
        )
    if layout != api.TensorFormat.LINEAR:
        raise InferenceError(
            Code.UNSUPPORTED,
            f"tensor '{name}' of model '{model}' has format {layout.name} in its engine; build it "
            "with inputs and outputs of the format LINEAR",
        )


def _binding(engine: Any, name: str, api: Any) -> Binding:
    data_type = DATA_TYPES[engine.get_tensor_dtype(name).name]
    on_host = engine.get_tensor_location(name) == api.TensorLocation.HOST
    return Binding(name, data_type, tuple(engine.get_tensor_shape(name)), on_host)


def _profile(engine: Any, inputs: Mapping[str, Binding], index: int) -> Profile:
    return {
        name: Range(*(tuple(each) for each in engine.get_tensor_profile_shape(name, index)))
        for name, binding in inputs.items()
        if not binding.on_host
    }


def size_bytes(binding: Binding, shape: Shape) -> int:
    """The size of a tensor of that shape in bytes."""
    return int(math.prod(shape) * SIZES[binding.data_type.datatype])


def closest(profiles: Mapping[int, Profile], shapes: Mapping[str, Shape], where: str) -> int:
    """The index of the profile that allows these shapes and has the nearest best shapes.

    `where` names model and device. Raises InferenceError INVALID_ARG with the profiles' ranges if
    none allows them.
    """
    found = [index for index, profile in profiles.items() if not refusals(profile, shapes)]
    if found:
        return min(found, key=lambda index: _distance(profiles[index], shapes))
    wrong = dict.fromkeys(each for some in profiles.values() for each in refusals(some, shapes))
    allowed = "; ".join(
        f"profile {index} takes {_ranges(profile, list(wrong))}"
        for index, profile in profiles.items()
    )
    given = ", ".join(f"'{name}' has shape {format_shape(shapes[name])}" for name in wrong)
    raise InferenceError(
        Code.INVALID_ARG,
        f"{where}: {given}, which no optimization profile of the instance allows: {allowed}; send "
        "such shapes, or name another profile in instance_group",
    )


def refusals(profile: Profile, shapes: Mapping[str, Shape]) -> Sequence[str]:
    """The inputs whose shape the profile does not allow."""
    return [name for name, each in profile.items() if not each.allows(shapes[name])]


def _distance(profile: Profile, shapes: Mapping[str, Shape]) -> int:
    return sum(each.distance(shapes[name]) for name, each in profile.items())


def _ranges(profile: Profile, names: Sequence[str]) -> str:
    return ", ".join(
        f"'{name}' from {format_shape(profile[name].least)} to {format_shape(profile[name].most)}"
        for name in names
    )
