"""The process that unpacks models, seen from the one that wants them."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from gateway.storage.store import StoreError

Progress = Callable[[str, float], None]
"""Told what is being done now, and which share of the whole is done."""

# -P: no folder but those of installed packages may decide what `import torch` means.
COMMAND = (sys.executable, "-P", "-m", "gateway.storage.unpacking.worker")


class Unpacker:
    """Unpacks one model after the other in a process of its own, which it starts when needed.

    A process, because the libraries that unpack then give their memory back, and an interrupt is a
    kill; one for all, because their import takes seconds. Leaving the block ends it.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def unpack(self, how: str, source: Path, folder: Path, progress: Progress) -> None:
        """Make what module `how` of `gateway.storage.unpacking` makes of `source`, in `folder`.

        Raises StoreError that says why not. Interrupted, nothing writes into `folder` any more.
        """
        self._worker = self._worker or _Worker()
        done = False
        try:
            done = self._worker.carry_out([how, str(source), str(folder)], progress)
            if not done:
                raise StoreError(f"unpacking '{source}' failed: {self._worker.last_words()}")
        finally:
            if not done:
                self._end()

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


class _Worker:
    """The running process, and what it says on stderr."""

    def __init__(self) -> None:
        with ExitStack() as opened:
            self._stderr: IO[bytes] = opened.enter_context(tempfile.TemporaryFile())
            pipe = subprocess.PIPE
            process = subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, stderr=self._stderr)
            self._process = opened.enter_context(process)
            self._resources = opened.pop_all()

    def carry_out(self, order: list[str], progress: Progress) -> bool:
        """Whether the order was carried out; if not, the process has ended."""
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        for line in self._process.stdout or ():
            report: dict[str, Any] = json.loads(line)
            if report["done"] == 1:
                return True
            progress(report["step"], report["done"])
        return False

    def last_words(self) -> str:
        """Why the process has ended by itself."""
        status = self._process.wait()
        if status < 0:
            return f"it was killed by signal {-status}; it needs about 1 GB of memory"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def end(self) -> None:
        """Stop it, whatever it does, and wait until it has gone."""
        self._process.kill()
        self._resources.close()
