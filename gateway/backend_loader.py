"""The installed backends; each is imported when the first model needs it."""

import os
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from gateway.backend import Backend, Instance
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError, failed_import
from gateway.messages import NO_PARAMETERS
from gateway.threads import IMPORTING

GROUP = "sluice.backends"
PYTHON = "python"
IN_PYTHON = "model.py"
"""The file of a backend written in Python, and the `runtime` in configs that selects it."""

OWN_BACKENDS = {
    "fil": "backends.fil.backend:FilBackend",
    "identity": "backends.identity:IdentityBackend",
    "onnxruntime": "backends.onnxruntime.backend:OnnxRuntimeBackend",
    "openvino": "backends.openvino.backend:OpenVinoBackend",
    "openvino_genai": "backends.openvino_genai.backend:OpenVinoGenAiBackend",
    "pytorch": "backends.pytorch.backend:PytorchBackend",
    "python": "backends.python.backend:PythonBackend",
    "repeat": "backends.repeat:RepeatBackend",
    "sklearn": "backends.sklearn.backend:SklearnBackend",
    "square": "backends.square:SquareBackend",
    "tensorflow": "backends.tensorflow.backend:TensorFlowBackend",
    "tensorrt": "backends.tensorrt.backend:TensorRtBackend",
    "tensorrtllm": "backends.tensorrtllm.backend:TensorRtLlmBackend",
    "vllm": "backends.vllm.backend:VllmBackend",
}
"""The backends of this repository, which need no entry points: module and class."""

MOVED_MODULES = {
    "gateway.data_type": "gateway.config",
    "gateway.openai_exchange": "gateway.openai_contract",
    "gateway.optimization": "gateway.config.optimization",
    "gateway.scheduling": "gateway.config.scheduling",
}
"""Modules of release 0.1 that plug-in backends may import, and their present names."""

EXTRAS = {
    "fil": "fil",
    "openvino": "openvino",
    "openvino_genai": "openvino_genai",
    "sklearn": "sklearn",
    "tensorflow": "tensorflow",
    "tensorrtllm": "trtllm",
}
"""Optional dependencies of Sluice that have all that a backend needs."""

NOT_SERVED = {
    "dali": "run the pipeline in a Python model, or decode pictures in an ensemble",
}
"""Triton's backends without a counterpart here, and the replacements."""

REPLACED_METHODS: Mapping[type, Mapping[str, str]] = {
    Backend: {
        "computes_on_gpus": "define the property 'computes_on_gpus'",
        "facts": "define the property 'facts'",
    },
    Instance: {
        "died": "set the attribute 'death', a future of the reason",
        "left": "subscribe to the 'cancellation' of a request",
        "metrics": "define the property 'metrics'",
        "stop": "subscribe to the 'cancellation' of a request, with 'may_stop'",
        "waits_for": "define the property 'waits_for'",
    },
}
"""Methods that plug-in backends may still define, and their replacements."""


class BackendEntryPoint(Protocol):
    """The part of `importlib.metadata.EntryPoint` that a loader uses."""

    name: str
    value: str

    def load(self) -> Any:
        """Import the module, and return its attribute."""


@dataclass(slots=True)
class OwnEntryPoint:
    """A backend of Sluice; `value` is written as that of an entry point: `module:Class`."""

    name: str
    value: str

    def load(self) -> Any:
        """Import the module, and return the class."""
        module, _, found = self.value.partition(":")
        return getattr(import_module(module), found)


class BackendLoader:
    """The installed backends: Sluice's own, and those of the entry-point group `sluice.backends`.

    An entry point with the name of an own backend has no effect.

    `settings` are those of `--backend-config` by backend; those under "" hold for every backend.
    `kept` is the folder for files that backends keep, None without one. A folder NAME with a
    model.py in `directory` is also the backend NAME: a copy of the backend `python` serves it.
    """

    def __init__(
        self,
        settings: Mapping[str, Mapping[str, str]] = NO_PARAMETERS,
        kept: Path | None = None,
        directory: Path | None = None,
    ) -> None:
        self._settings = settings
        self._kept = kept
        self._directory = directory
        self._loaded: dict[tuple[str, Path | None], Backend] = {}

    @property
    def names(self) -> list[str]:
        """The names of the installed backends."""
        return sorted({*OWN_BACKENDS, *self._plugins})

    def of(self, config: ModelConfig) -> Backend:
        """The backend of a config: installed, or else a folder with a model.py.

        If both exist, `runtime` selects: `libtriton_NAME.so` the installed one, `model.py` the
        folder (Triton: backend library search). Raises InferenceError.
        """
        name, runtime = config.backend, config.runtime
        if self._point(name) is not None and runtime in ("", f"libtriton_{name}.so"):
            return self.get(name)
        if runtime in ("", IN_PYTHON) and (home := self._home(name)) is not None:
            return self._get(name, home)
        if name == PYTHON and runtime == IN_PYTHON:
            return self.get(name)
        if runtime:
            raise _no_such_runtime(config)
        return self.get(name)

    def get(self, name: str) -> Backend:
        """The backend of that name, created at its first use; the import may take seconds.

        Only one backend is created at a time, also if models load in several threads
        (`IMPORTING`). A created backend is returned without waiting.

        Raises InferenceError that names the installed backends, or the missing package.
        """
        return self._get(name, None)

    def computes_on_gpus(self, name: str) -> bool:
        """Whether the runtime can use GPUs; True if the backend fails, as the load then fails."""
        try:
            return self._point(name) is None or self.get(name).computes_on_gpus
        except InferenceError:
            return True

    def find(self, name: str) -> BackendEntryPoint:
        """The entry point of a backend, without an import; InferenceError if not installed."""
        point = self._point(name)
        if point is None and name in NOT_SERVED:
            text = f"backend '{name}' is not served here: {NOT_SERVED[name]}"
            raise InferenceError(Code.UNSUPPORTED, text)
        if point is None:
            raise InferenceError(
                Code.INVALID_ARG,
                f"unable to find backend '{name}'; installed backends: {', '.join(self.names)}",
            )
        return point

    @cached_property
    def _plugins(self) -> Mapping[str, BackendEntryPoint]:
        """The entry points, read when a name is first used that no own backend has.

        The import of `importlib.metadata` takes 1 MiB, and reading up to 0.1 s.
        """
        points = import_module("importlib.metadata").entry_points(group=GROUP)
        return {point.name: point for point in points}

    def _point(self, name: str) -> BackendEntryPoint | None:
        if name in OWN_BACKENDS:
            return OwnEntryPoint(name, OWN_BACKENDS[name])
        return self._plugins.get(name)

    def _home(self, name: str) -> Path | None:
        """The folder of a backend written in Python, if it exists now."""
        if self._directory is None or Path(name).name != name or name.startswith("."):
            return None
        home = self._directory / name
        # False, too, for a text that is no valid file name.
        return home if os.path.isfile(home / IN_PYTHON) else None

    def _get(self, name: str, home: Path | None) -> Backend:
        if (name, home) in self._loaded:
            return self._loaded[name, home]
        with IMPORTING:
            return self._created(name, home)

    def _created(self, name: str, home: Path | None) -> Backend:
        if (name, home) not in self._loaded:
            self._loaded[name, home] = self._create(name, home)
        return self._loaded[name, home]

    def _create(self, name: str, home: Path | None) -> Backend:
        runs_it = PYTHON if home else name
        # A copy shares state with the installed backend, such as the metrics of models.

        backend = copy(self._created(PYTHON, None)) if home else _import(self.find(name))
        backend.settings = {**self._settings.get("", {}), **self._settings.get(name, {})}
        backend.kept = None if self._kept is None else self._kept / runs_it
        backend.home = home
        return backend


def refuse_replaced_methods(part: Backend | Instance, seam: type) -> None:
    """Raise InferenceError if `part` has a method that `seam`, Backend or Instance, had before."""
    made = type(part)
    for name, fix in REPLACED_METHODS[seam].items():
        if callable(getattr(made, name, None)):
            raise InferenceError(
                Code.UNAVAILABLE,
                f"'{made.__module__}.{made.__qualname__}' has the method '{name}', which "
                f"gateway.backend.{seam.__name__} no longer has; {fix} instead",
            )


def _no_such_runtime(config: ModelConfig) -> InferenceError:
    if config.runtime == IN_PYTHON:
        return InferenceError(
            Code.INVALID_ARG,
            f"unable to find Python backend based backend library '{IN_PYTHON}' for model "
            f"'{config.name}', searched: '{config.backend}' in the --backend-directory",
        )
    return InferenceError(
        Code.INVALID_ARG,
        f"model '{config.name}' asks for runtime '{config.runtime}' of backend '{config.backend}'; "
        f"expected none, or '{IN_PYTHON}' for the one in the --backend-directory",
    )


def _import(point: BackendEntryPoint) -> Backend:
    try:
        backend = point.load()()
    except (ImportError, OSError) as error:
        raise failed_import(f"backend '{point.name}'", error, _fix(point.name, error)) from error
    if not isinstance(backend, Backend):
        raise InferenceError(
            Code.INTERNAL, f"backend '{point.name}' is no gateway.backend.Backend: {point.value}"
        )
    refuse_replaced_methods(backend, Backend)
    return backend


def _fix(name: str, error: ImportError | OSError) -> str:
    """The remedy of a failed import; an error of the system explains itself."""
    if isinstance(error, OSError):
        return ""
    if moved := MOVED_MODULES.get(error.name or ""):
        return f"import '{moved}' instead"
    extra = EXTRAS.get(name)
    return f"pip install 'sluice[{extra}]'" if extra else "install what it needs"
