"""Failures of ONNX Runtime as clients read them: without paths of the host and C++ sources."""

import re
from pathlib import Path
from types import TracebackType

from onnxruntime.capi import onnxruntime_pybind11_state as state

from gateway.errors import Code, InferenceError

RUNTIME_ERRORS: tuple[type[Exception], ...] = (
    *(
        each
        for each in vars(state).values()
        if isinstance(each, type) and issubclass(each, Exception)
    ),
    RuntimeError,
    ValueError,
    TypeError,
    MemoryError,
)
"""All exceptions of the library: its own have no common base, and bindings raise Python's."""

NUMBERED = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : ")
SOURCE = re.compile(
    r"\S*\.(?:cc|cpp|h|hpp|cu|cuh):\d+ (?:[\w:~<>]+(?: [\w:*&~<>]+)*\([^\n]*?\)(?: const)? )?"
)
"""A place in the library's C++ sources, and the function after it."""
SPACES = re.compile(r"\s+")
LONGEST = 2000


class ClearFailures:
    """A context that turns a failure of the library into InferenceError INTERNAL.

    `what` begins its text. `folder` is the model's; the text omits it and its parents.
    """

    __slots__ = ("_folder", "_what")

    def __init__(self, folder: Path, what: str) -> None:
        self._folder = folder
        self._what = what

    def __enter__(self) -> None:
        """The block calls the library."""

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RUNTIME_ERRORS):
            text = f"{self._what}: {_clear(str(error), self._folder)}"
            raise InferenceError(Code.INTERNAL, text) from error


def _clear(text: str, folder: Path) -> str:
    number = NUMBERED.search(text)
    text = NUMBERED.sub("", text)
    for known in {folder, folder.resolve()}:
        text = text.replace(f"{known}/", "").replace(str(known), folder.name)
        for above in known.parents[:-1]:
            text = text.replace(f"{above}/", "")
    text = SPACES.sub(" ", SOURCE.sub("", text)).strip()[:LONGEST]
    return f"onnx runtime error {number[1] if number else 1}: {text}"
