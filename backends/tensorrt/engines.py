"""Engines of plans, shared by the instances on a GPU."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from backends.tensorrt.cuda import CudaRuntime, Properties
from backends.tensorrt.failures import Subject, load_failure
from backends.tensorrt.library import Library
from backends.tensorrt.parameters import PLUGINS, version_compatible
from backends.tensorrt.signature import EngineSignature
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import NO_PARAMETERS

DEFAULT = "model.plan"


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
            f"unable to load model '{subject.model}': there is no DLA core {dla_core} beside GPU "
            f"{subject.device}, TensorRT finds {runtime.num_DLA_cores}; correct "
            "`secondary_devices` of its instance_group",
        )
    runtime.DLA_core = dla_core
