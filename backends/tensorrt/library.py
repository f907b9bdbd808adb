"""The installed TensorRT: its log and plugins, and its failures as clients read them.

TensorRT logs the reasons of its failures, and returns None or False.
"""

import ctypes
import importlib
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.tensorrt.cuda import CudaError, Properties
from gateway.errors import Code, InferenceError, died

log = logging.getLogger("sluice.tensorrt")

SOURCE = re.compile(r"\[?[\w:/.-]+\.(?:cpp|cc|h|hpp|cu|cuh)(?:::\S*?::\d+|:\d+)\]?:?\s*")
"""A place in the library's C++ sources."""
PATH = re.compile(r"(?<![\w.])/(?:[^\s/'\":;,()]+/)+")
"""The folders of a path of the host."""
SPACES = re.compile(r"\s+")
LONGEST = 2000
SILENT = "TensorRT gives no reason"

LIBRARY_ERRORS = (RuntimeError, ValueError, MemoryError)
"""Exceptions of the bindings."""

READING_FIXES = (
    (("host code", "hostcode"), "allow it with --backend-config=tensorrt,version-compatible=true"),
    (("plugin", "creator"), "name its library in --backend-config=tensorrt,plugins=a.so;b.so"),
    (("memory", "alloc"), "unload other models, or put this one on another GPU"),
)
"""Remedies by words in TensorRT's reason; the default is to rebuild the plan."""


class LibraryError(Exception):
    """A refusal of TensorRT; the text is its own, cleared for clients."""


class LibraryLog:
    """TensorRT's log, one per process, with the last error of each thread.

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
        """The logger for the library: an object of a subclass of its own."""
        members = {"log": lambda _, severity, msg: self.add(severity, msg)}
        return type("Logger", (self._base,), members)()

    def add(self, severity: Any, text: str) -> None:
        """Remember an error, and write the line to the server's log."""
        level = self._levels.get(severity, logging.DEBUG)
        log.log(level, "TensorRT message", extra={"text": text})
        if severity in self._errors:
            self._of_thread.last = text

    def forget(self) -> None:
        """Clear the last error of this thread."""
        self._of_thread.last = ""

    @property
    def last(self) -> str:
        """The last error of this thread, without C++ and folders of the host."""
        return clear(getattr(self._of_thread, "last", "")) or SILENT

    def require(self, done: object, call: str) -> None:
        """Raise LibraryError with the last error, unless the call has succeeded."""
        if not done:
            raise LibraryError(f"{call}: {self.last}")


def clear(text: str) -> str:
    """A message of the library for clients."""
    return SPACES.sub(" ", PATH.sub("", SOURCE.sub("", text))).strip()[:LONGEST]


FULL = "tensorrt"
RUNTIMES = (FULL, "tensorrt_lean", "tensorrt_dispatch")
"""The first installed one is used; the last two read version-compatible plans only."""
CUDA = "cuda.bindings.runtime"
SYMBOLS_OF_REGISTRY = ("getCreators", "getPluginCreators")
"""Symbols of a plugin library that the registry must load."""
FIX = "`pip install 'sluice[cuda]'` brings TensorRT and CUDA's Python bindings"


@dataclass(frozen=True, slots=True)
class Library:
    """The installed runtime (`api`, a module), CUDA's binding, and the runtime's log."""

    api: Any
    cuda: Any
    log: LibraryLog
    logger: Any

    @classmethod
    def find(cls) -> "Library":
        """Import them; ImportError names a missing one and its remedy."""
        api = _first_installed()
        try:
            cuda = importlib.import_module(CUDA)
        except ImportError as error:
            raise ImportError(f"{error}; {FIX}") from error
        library_log = LibraryLog(api.ILogger)
        return cls(api, cuda, library_log, library_log.logger())

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
        self.log.forget()
        if self.api.get_plugin_registry().load_library(path) is None:
            raise _unloadable(path, self.log.last)


def _first_installed() -> Any:
    for name in RUNTIMES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
        except ImportError as error:  # the bindings are installed, and their library is not
            raise ImportError(f"{name} is installed, but does not import: {error}") from error
    raise ImportError(f"none of {', '.join(RUNTIMES)} is installed; {FIX}")


def _unloadable(path: str, reason: str) -> InferenceError:
    name = Path(path).name
    return InferenceError(
        Code.UNAVAILABLE,
        f"--backend-config=tensorrt,plugins: unable to load '{name}': "
        f"{reason.replace(path, name)}; correct the path, or build the library for this machine",
    )


@dataclass(frozen=True, slots=True)
class Subject:
    """A model on a device, as errors name it."""

    model: str
    device: int
    properties: Properties | None = None

    @property
    def gpu(self) -> str:
        """Such as `GPU 0 (NVIDIA H200, compute capability 9.0)`."""
        if self.properties is None:
            return f"GPU {self.device}"
        name, capability = self.properties.name, self.properties.capability
        return f"GPU {self.device} ({name}, compute capability {capability})"

    def unreadable(self, library: Library) -> InferenceError:
        """The error of a plan that is no engine here; the library's log has the reason."""
        reason = library.log.last
        text = f"{self._not_loaded}: unable to create TensorRT engine: {reason}"
        return InferenceError(Code.INTERNAL, f"{text}; {self._fix(reason, library)}")

    def uncreated(self, what: str, reason: str) -> InferenceError:
        """The error of a failed creation."""
        return InferenceError(
            Code.INTERNAL, f"{self._not_loaded}: unable to create {what}: {reason}"
        )

    def unloaded(self, error: CudaError) -> InferenceError:
        """The error of a failed CUDA call during the load."""
        if error.out_of_memory:
            return InferenceError(
                Code.UNAVAILABLE,
                f"{self._not_loaded}: out of GPU memory ({error}); unload other models, lower "
                "`count` of its instance_group, or put it on another GPU",
            )
        return InferenceError(
            Code.UNAVAILABLE,
            f"{self._not_loaded}: {error}; see whether nvidia-smi shows the GPU and a driver that "
            "is new enough, and restart the server once it does",
        )

    def out_of_memory(self, error: CudaError) -> InferenceError:
        """The error of an execution without memory; the instance continues."""
        return InferenceError(
            Code.UNAVAILABLE,
            f"model '{self.model}' is out of memory on {self.gpu} ({error}); send smaller "
            "requests, try again later, or unload other models",
        )

    def failed(self, reason: str) -> InferenceError:
        """The error of a failed execution; the instance continues."""
        return InferenceError(
            Code.INTERNAL, f"model '{self.model}' failed on {self.gpu}: TensorRT: {reason}"
        )

    def lost(self, error: CudaError) -> InferenceError:
        """The error of a device that has failed permanently."""
        return died(
            f"{self.gpu} of model '{self.model}' is gone for this process: {error}; see whether "
            "nvidia-smi shows it, and restart the server",
        )

    @property
    def _not_loaded(self) -> str:
        return f"unable to load model '{self.model}' on {self.gpu}"

    def _fix(self, reason: str, library: Library) -> str:
        words = reason.lower()
        for marks, fix in READING_FIXES:
            if any(mark in words for mark in marks):
                return fix
        if library.api.__name__ != FULL:
            return (
                f"{library.name} reads version-compatible plans alone: build it as one, or install "
                f"'{FULL}'"
            )
        return f"build the plan on such a GPU with {library.name}, or as version-compatible"


@contextmanager
def load_failure(subject: Subject) -> Iterator[None]:
    """Turn errors of CUDA and the library in the block into InferenceError."""
    try:
        yield
    except CudaError as error:
        raise subject.unloaded(error) from error
    except LibraryError as error:
        raise subject.uncreated("an execution context", str(error)) from error
    except LIBRARY_ERRORS as error:
        raise subject.uncreated("TensorRT engine", clear(str(error))) from error
