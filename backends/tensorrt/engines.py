"""Engines of plans: their inputs, outputs and profiles, shared by the instances on a GPU."""

import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from backends.tensorrt.cuda import CudaRuntime, Properties
from backends.tensorrt.library import Library, Subject, load_failure
from backends.tensorrt.parameters import PLUGINS, version_compatible
from gateway.config import ModelConfig
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import NO_PARAMETERS
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

DEFAULT = "model.plan"


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


def find_plan(config: ModelConfig, folder: Path, capability: str) -> Path:
    """The plan that the config names for GPUs of that compute capability, or for all.

    Raises InferenceError UNAVAILABLE, as Triton, if it is missing, and INVALID_ARG for a name
    outside of the version folder.
    """
    default = config.default_model_filename or DEFAULT
    name = config.cc_model_filenames.get(capability, default)
    path = Path(os.path.normpath(folder / name))
    if "\0" in name or not path.is_relative_to(folder) or path == folder:
        raise InferenceError(
            Code.INVALID_ARG,
            f"file '{name}' of model '{config.name}' is outside of the model's version folder",
        )
    if not path.is_file():
        raise InferenceError(
            Code.UNAVAILABLE,
            f"unable to find '{folder.name}/{name}' for model instance '{config.name}'",
        )
    return path


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Engine:
    """One plan in the memory of one GPU; freed with its last instance.

    `plan` is the library's engine, `api` its module; the runtime must live as long as the engine.
    """

    api: Any
    runtime: Any
    plan: Any
    signature: EngineSignature
    subject: Subject


class Engines:
    """Opens plans, one at a time: TensorRT does not read several at once.

    Instances of one file on one device share an engine, and so its weights. Plugins are loaded
    before the first; `settings` are those of `--backend-config`.
    """

    def __init__(self, library: Library) -> None:
        self.settings = NO_PARAMETERS
        self._library = library
        self._cuda = CudaRuntime(library.cuda)
        self._lock = threading.Lock()
        self._ready = False
        self._shared: WeakValueDictionary[tuple[object, ...], Engine] = WeakValueDictionary()

    def open(self, config: ModelConfig, folder: Path, device: int, dla_core: int | None) -> Engine:
        """The engine of a version on a device, which this thread uses from now on.

        With `dla_core` the layers built for a DLA execute on that core. Blocks while the plan is
        read. Raises InferenceError with model, device and remedy.
        """
        with self._lock:
            properties = self._use(config, device)
            file = find_plan(config, folder, properties.capability)
            status = file.stat()
            key = (file, status.st_ino, status.st_mtime_ns, status.st_size, device, dla_core)
            engine = self._shared.get(key)
            if engine is None:
                self._prepare()
                subject = Subject(config.name, device, properties)
                engine = self._shared[key] = self._read(file, subject, dla_core)
            return engine

    def _use(self, config: ModelConfig, device: int) -> Properties:
        with load_failure(Subject(config.name, device)):
            count = self._cuda.count()
            if device >= count:
                raise InferenceError(
                    Code.INVALID_ARG,
                    f"unable to load model '{config.name}': there is no GPU {device}, CUDA finds "
                    f"{count}; correct `gpus` of its instance_group, or CUDA_VISIBLE_DEVICES",
                )
            self._cuda.use(device)
            return self._cuda.properties(device)

    def _prepare(self) -> None:
        if not self._ready:
            self._library.load_plugins(self.settings.get(PLUGINS, ""))
            self._ready = True

    def _read(self, file: Path, subject: Subject, dla_core: int | None) -> Engine:
        library = self._library
        allowed = version_compatible(self.settings)
        with load_failure(subject):
            library.log.forget()
            try:
                runtime = library.api.Runtime(library.logger)
            except TypeError as error:  # the binding's error for null
                raise subject.uncreated("TensorRT runtime", library.log.last) from error
            runtime.engine_host_code_allowed = allowed
            if dla_core is not None:
                _choose(runtime, dla_core, subject)
            found = runtime.deserialize_cuda_engine(file.read_bytes())
            if found is None:
                raise subject.unreadable(library)
            signature = EngineSignature.of(found, library.api, subject.model)
            return Engine(library.api, runtime, found, signature, subject)


def _choose(runtime: Any, dla_core: int, subject: Subject) -> None:
    """Make a runtime execute on that DLA core; INVALID_ARG if the machine lacks it."""
    if dla_core >= runtime.num_DLA_cores:
        raise InferenceError(
            Code.INVALID_ARG,
            f"unable to load model '{subject.model}': there is no DLA core {dla_core} on GPU "
            f"{subject.device}, TensorRT finds {runtime.num_DLA_cores}; correct "
            "`secondary_devices` of its instance_group",
        )
    runtime.DLA_core = dla_core
