"""The process that unpacks models: its owner `Unpacker`, and its own end when run as a module.

`python -m gateway.storage.unpacking.process` reads orders from stdin, one JSON list per line: the
module of this package (and a function, by default `unpack`), the source, the folder. It writes
reports to stdout, one JSON object per line; `done` is 1 at the end of an order. The process ends
with a traceback at the first failure, and when its stdin closes, so it never outlives its parent.
"""

import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from gateway.storage.store import StoreError

Progress = Callable[[str, float], None]
"""Called with the present step, and the done fraction of the whole."""

# -P: the working directory is not on the path, so `import torch` finds the installed package.
COMMAND = (sys.executable, "-P", "-m", "gateway.storage.unpacking.process")

Report = Callable[[str, float], None]
"""Called with the present step, and the done fraction of the whole: below 1."""

Orders = queue.SimpleQueue[tuple[str, str, str]]


class Unpacker:
    """Unpacks one model after the other in a process of its own, started at the first.

    A process returns the memory of its libraries and can be killed at an interrupt. All models
    share it, because the imports take seconds. The end of the `with` block ends it.
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
        """Unpack `source` into `folder` by `how`, a module of this package or `module:function`.

        Raises StoreError. After an interrupt nothing writes into `folder`.
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
        """Send an order and wait; False if the process ended instead."""
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
        """The reason for the end of the process."""
        status = self._process.wait()
        if status < 0:
            return f"it was killed by signal {-status}; it needs about 1 GB of memory"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def end(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._resources.close()


def main() -> None:
    """Execute orders until the process ends."""
    orders: Orders = queue.SimpleQueue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    report = _reporter()
    while True:
        how, source, folder = orders.get()
        report("starting", 0)  # before the import, which takes seconds
        module, _, function = how.partition(":")
        unpacking = importlib.import_module(f"gateway.storage.unpacking.{module}")
        getattr(unpacking, function or "unpack")(Path(source), Path(folder), report)
        report("done", 1)


def _read(orders: Orders) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(1)


def _reporter() -> Report:
    # Output of libraries, also of C code, goes to stderr and does not mix with the reports.

    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(step: str, done: float) -> None:
        stdout.write(json.dumps({"step": step, "done": done}) + "\n")
        stdout.flush()

    return report


if __name__ == "__main__":
    main()
