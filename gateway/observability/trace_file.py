"""The files that traces are written to (trace extension, mode triton)."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

log = logging.getLogger("sluice.trace")


class TraceFile:
    """One file for what comes in pieces, and numbered ones for what is whole.

    Each is a JSON array. What cannot be written is logged and lost: tracing must not fail requests.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._index = 0
        self._begun = False

    def append(self, traces: Sequence[str]) -> None:
        """Add traces, each JSON objects with commas between them, to the file without a number."""
        if traces:
            self._write("," if self._begun else "[", ",".join(traces))
            self._begun = True

    def write_numbered(self, traces: Iterable[str]) -> None:
        """Write a file of its own, with the next number."""
        path = Path(f"{self._path}.{self._index}")
        self._index += 1
        try:
            path.write_text(f"[{','.join(traces)}]", encoding="utf-8")
        except OSError as error:
            self._tell(error)

    def close(self) -> None:
        """End the array of the file without a number."""
        if self._begun:
            self._write("]")

    def _write(self, *texts: str) -> None:
        """Write behind what this process has written; what was there before it is replaced."""
        try:
            with Path(self._path).open("a" if self._begun else "w", encoding="utf-8") as file:
                file.writelines(texts)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        log.error("traces not written", extra={"file": self._path, "reason": error.strerror})
