"""Which TensorRT is installed, and which plugins does it have?"""

import ctypes
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.tensorrt.listening import Ear
from gateway.errors import Code, InferenceError

FULL = "tensorrt"
RUNTIMES = (FULL, "tensorrt_lean", "tensorrt_dispatch")
"""The first that is installed is used; the latter two read version-compatible plans alone."""
CUDA = "cuda.bindings.runtime"
SYMBOLS_OF_REGISTRY = ("getCreators", "getPluginCreators")
"""What a library of plugins has if it wants the registry to ask for its plugins."""
FIX = "`pip install 'sluice[cuda]'` brings TensorRT and CUDA's Python bindings"


@dataclass(frozen=True, slots=True)
class Library:
    """The installed runtime (`api`, a module), the binding of CUDA's, and what the former says."""

    api: Any
    cuda: Any
    ear: Ear
    logger: Any

    @classmethod
    def find(cls) -> "Library":
        """Import them; ImportError says what is missing and how to get it."""
        api = _first_installed()
        try:
            cuda = importlib.import_module(CUDA)
        except ImportError as error:
            raise ImportError(f"{error}; {FIX}") from error
        ear = Ear(api.ILogger)
        return cls(api, cuda, ear, ear.logger())

    @property
    def name(self) -> str:
        """Such as `tensorrt 10.14.1.48`."""
        return f"{self.api.__name__} {self.api.__version__}"

    def load_plugins(self, paths: str) -> None:
        """Register TensorRT's own plugins, and those of the libraries `a.so;b.so`.

        Raises InferenceError UNAVAILABLE naming the library that cannot be loaded.
        """
        if hasattr(self.api, "init_libnvinfer_plugins"):
            self.api.init_libnvinfer_plugins(self.logger, "")
        for path in filter(None, (each.strip() for each in paths.split(";"))):
            self._load_plugin(path)

    def _load_plugin(self, path: str) -> None:
        try:
            # Plugins of the older kind register themselves when their library is loaded.
            opened = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise _unloadable(path, str(error)) from error
        if any(hasattr(opened, symbol) for symbol in SYMBOLS_OF_REGISTRY):
            self._register(path)

    def _register(self, path: str) -> None:
        self.ear.forget()
        if self.api.get_plugin_registry().load_library(path) is None:
            raise _unloadable(path, self.ear.last)


def _first_installed() -> Any:
    for name in RUNTIMES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
        except ImportError as error:  # the bindings are there, and their library is not
            raise ImportError(f"{name} is installed, but does not import: {error}") from error
    raise ImportError(f"none of {', '.join(RUNTIMES)} is installed; {FIX}")


def _unloadable(path: str, reason: str) -> InferenceError:
    name = Path(path).name
    return InferenceError(
        Code.UNAVAILABLE,
        f"--backend-config=tensorrt,plugins: unable to load '{name}': "
        f"{reason.replace(path, name)}; correct the path, or build the library for this machine",
    )
