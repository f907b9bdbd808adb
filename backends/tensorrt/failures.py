"""Failures as clients read them: model, device, reason and remedy."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backends.tensorrt.cuda import CudaError, Properties
from backends.tensorrt.library import FULL, Library, LibraryError, clear
from gateway.errors import Code, InferenceError

LIBRARY_ERRORS = (RuntimeError, ValueError, MemoryError)
"""Exceptions of the bindings."""

READING_FIXES = (
    (("host code", "hostcode"), "allow it with --backend-config=tensorrt,version-compatible=true"),
    (("plugin", "creator"), "name its library in --backend-config=tensorrt,plugins=a.so;b.so"),
    (("memory", "alloc"), "unload other models, or put this one on another GPU"),
)
"""Remedies by words in TensorRT's reason; the default is to rebuild the plan."""


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
        return InferenceError(
            Code.UNAVAILABLE,
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
