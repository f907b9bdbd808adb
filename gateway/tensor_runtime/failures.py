"""Failures of a runtime's library, as errors in one line."""

import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from gateway.errors import Code, InferenceError

SOURCE = re.compile(
    r"\S*\.(?:cc|cpp|h|hpp|cu|cuh):\d+ (?:[\w:~<>]+(?: [\w:*&~<>]+)*\([^\n]*?\)(?: const)? )?"
)
"""A place in C++ sources, and the function after it."""
SPACES = re.compile(r"\s+")
LONGEST = 2000


class ClearFailures:
    """A context that turns a failure of the library into InferenceError INTERNAL.

    `errors` are the library's exceptions. `what` begins the text. `folder` is the model's; the text
    omits it and its parents. `named` puts the name of the library before its reason, and may cut
    what only its developers understand.
    """

    __slots__ = ("_errors", "_folder", "_named", "_what")

    def __init__(
        self,
        folder: Path,
        what: str,
        errors: tuple[type[Exception], ...],
        named: Callable[[str], str],
    ) -> None:
        self._folder = folder
        self._what = what
        self._errors = errors
        self._named = named

    def __enter__(self) -> None:
        """The block calls the library."""

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, self._errors):
            text = self._named(_without_folder(str(error), self._folder))
            raise InferenceError(Code.INTERNAL, f"{self._what}: {_in_one_line(text)}") from error


def _without_folder(text: str, folder: Path) -> str:
    """The text without the places of the folder and its parents on the host."""
    for known in {folder, folder.resolve()}:
        text = text.replace(f"{known}/", "").replace(str(known), folder.name)
        for above in known.parents[:-1]:
            text = text.replace(f"{above}/", "")
    return text


def _in_one_line(text: str) -> str:
    """The text without places in C++ sources, in one line of at most LONGEST characters."""
    return SPACES.sub(" ", SOURCE.sub("", text)).strip()[:LONGEST]
