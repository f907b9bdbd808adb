"""The backend `openvino`: models by OpenVINO, on CPUs; other devices by its own plug-ins."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from backends.openvino.instance import Compiled, OpenVinoInstance
from backends.openvino.library import openvino
from backends.openvino.model_file import (
    FittedModel,
    check_bounds,
    clear_failures,
    fit,
    has_batches,
    read_model,
    signature,
)
from backends.openvino.parameters import OpenVinoParameters
from gateway.backend import Backend, Instance, ModelContext
from gateway.config import InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.checks import check
from gateway.tensor_runtime.completion import (
    DEFAULT_BATCH_SIZE,
    USUAL_BATCH_SIZE,
    complete,
    is_complete,
)
from gateway.tensor_runtime.model_files import file_stamps
from gateway.tensor_runtime.parameters import count
from gateway.threads import apart

Key = tuple[object, ...]
"""The folder, the files and the config of instances that share a compiled model."""


class OpenVinoBackend(Backend):
    """The instances of a model share its compiled form, as on Triton, if its dims are fixed.

    With variable dims each has its own: streams of one compiled model now and then gave an output
    the shape of an earlier run of another stream (OpenVINO 2026.4.1, two streams, MiniLM). They are
    compiled side by side; models never wait for each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: WeakValueDictionary[Key, Compiled] = WeakValueDictionary()
        self._turns: WeakValueDictionary[Key, threading.Semaphore] = WeakValueDictionary()

    @property
    def computes_on_gpus(self) -> bool:
        """Instances of KIND_GPU are for CUDA; TARGET_DEVICE selects Intel's."""
        return False

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        parameters = OpenVinoParameters.read(config, path)
        if is_complete(config):
            return config
        model = read_model(_core(config, path, parameters), config, path)
        size = count(self.settings, DEFAULT_BATCH_SIZE, USUAL_BATCH_SIZE)
        batches = config.batching or has_batches(model)
        return complete(config, signature(model, config), size if batches else None)

    async def load(self, context: ModelContext) -> Instance:
        if context.group.kind is not InstanceKind.KIND_CPU:
            raise InferenceError(
                Code.INVALID_ARG,
                f"unable to load model '{context.config.name}', Triton OpenVINO backend supports "
                "only Kind CPU and AUTO",
            )
        return await apart(self._load, context, discard=OpenVinoInstance.discard)

    def _load(self, context: ModelContext) -> OpenVinoInstance:
        return OpenVinoInstance(context, self._compiled(context.config, context.path))

    def _compiled(self, config: ModelConfig, folder: Path) -> Compiled:
        key = (folder, file_stamps(folder), repr(config))
        with self._turn(key):
            if (shared := self._shared.get(key)) is not None:
                return shared
            prepared = _prepare(config, folder)
            if not prepared.variable:
                compiled = self._shared[key] = _compile(prepared, config, folder)
                return compiled
        return _compile(prepared, config, folder)

    @contextmanager
    def _turn(self, key: Key) -> Iterator[None]:
        """Wait for other instances of the same model, but for no other model's."""
        with self._lock:
            turn = self._turns.setdefault(key, threading.Semaphore())
        with turn:
            yield


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A model to compile; `variable`: an input has dims of any size."""

    core: Any
    fitted: FittedModel
    parameters: OpenVinoParameters
    variable: bool


def _prepare(config: ModelConfig, folder: Path) -> _Prepared:
    parameters = OpenVinoParameters.read(config, folder)
    core = _core(config, folder, parameters)
    what = f"unable to load model '{config.name}'"
    model = read_model(core, config, folder)
    with clear_failures(folder, what, "setting max batch size"):
        fitted = fit(model, config, reshapes=parameters.reshapes)
    check(config, fitted.signature(config))
    check_bounds(config, fitted.model)
    variable = any(port.get_partial_shape().is_dynamic for port in fitted.model.inputs)
    return _Prepared(core, fitted, parameters, variable)


def _compile(prepared: _Prepared, config: ModelConfig, folder: Path) -> Compiled:
    parameters = prepared.parameters
    properties = parameters.of_one_instance(config) if prepared.variable else parameters.properties
    with clear_failures(folder, f"unable to load model '{config.name}'", "loading model"):
        model = prepared.core.compile_model(
            prepared.fitted.model, parameters.device, dict(properties)
        )
    return Compiled(model, prepared.fitted.rows)


def _core(config: ModelConfig, folder: Path, parameters: OpenVinoParameters) -> Any:
    """The library; an extension is added to this core only."""
    what = f"unable to load model '{config.name}'"
    with clear_failures(folder, what, " loading custom CPU extensions"):
        core = openvino.Core()
        if parameters.extension is not None:
            core.add_extension(str(parameters.extension))
        return core
