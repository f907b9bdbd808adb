"""The installed TensorRT, its log and its plugins.

TensorRT logs the reasons of its failures, and returns None or False.
"""

import ctypes
import importlib
import logging
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.errors import Code, InferenceError

log = logging.getLogger("sluice.tensorrt")

SOURCE = re.compile(r"\[?[\w:/.-]+\.(?:cpp|cc|h|hpp|cu|cuh)(?:::\S*?::\d+|:\d+)\]?:?\s*")
"""A place in the library's C++ sources."""
PATH = re.compile(r"(?<![\w.])/(?:[^\s/'\":;,()]+/)+")
"""The folders of a path of the host."""
SPACES = re.compile(r"\s+")
LONGEST = 2000
SILENT = "TensorRT gives no reason"


class LibraryError(Exception):
    """TensorRT refused a call; the text is its own, as clients may read it."""


class Ear:
    """Hears TensorRT's log, of which a process has one; each thread knows its own last error.

    `base` is the library's `ILogger`.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._of_thread = threading.local()
        self._errors = (base.Severity.INTERNAL_ERROR, base.Severity.ERROR)
        self._levels = {
            base.Severity.INTERNAL_ERROR: logging.ERROR,
            base.Severity.ERROR: logging.ERROR,
            base.Severity.WARNING: logging.WARNING,
        }

    def logger(self) -> Any:
        """What the library wants to be given: an object of a class made from its own."""
        members = {"log": lambda _, severity, msg: self.hear(severity, msg)}
        return type("Logger", (self._base,), members)()

    def hear(self, severity: Any, text: str) -> None:
        """Remember an error, and pass all that matters on to the server's log."""
        level = self._levels.get(severity, logging.DEBUG)
        log.log(level, "said", extra={"text": text})
        if severity in self._errors:
            self._of_thread.last = text

    def forget(self) -> None:
        """What comes next is about something else."""
        self._of_thread.last = ""

    @property
    def last(self) -> str:
        """The last error of this thread, without C++ and without folders of the host."""
        return clear(getattr(self._of_thread, "last", "")) or SILENT

    def require(self, done: object, call: str) -> None:
        """Raise LibraryError, with what was heard, for a call that has not done its work."""
        if not done:
            raise LibraryError(f"{call}: {self.last}")


def clear(text: str) -> str:
    """A message of the library as clients may read it."""
    return SPACES.sub(" ", PATH.sub("", SOURCE.sub("", text))).strip()[:LONGEST]


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
