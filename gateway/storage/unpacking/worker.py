"""The process that unpacks models: `python -m gateway.storage.unpacking.worker`.

It takes orders from stdin, one JSON list per line: the module of this package, the source, the
folder. It tells its steps on stdout, one JSON object per line; `done` is 1 when the order is. It
ends with a traceback at the first failure, and when its stdin closes: whoever started it holds the
other end, so it never outlives its parent.
"""

import importlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path

Report = Callable[[str, float], None]
"""Tells what is done now, and which share of the whole is done: less than 1."""

Orders = queue.SimpleQueue[tuple[str, str, str]]


def main() -> None:
    """Carry out orders until the process is ended."""
    orders: Orders = queue.SimpleQueue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    report = _reporter()
    while True:
        how, source, folder = orders.get()
        report("starting", 0)  # told before the seconds that importing takes
        unpacking = importlib.import_module(f"gateway.storage.unpacking.{how}")
        unpacking.unpack(Path(source), Path(folder), report)
        report("done", 1)


def _read(orders: Orders) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(1)


def _reporter() -> Report:
    # What libraries print, in C too, goes to stderr from now on and never mixes with the reports.
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(step: str, done: float) -> None:
        stdout.write(json.dumps({"step": step, "done": done}) + "\n")
        stdout.flush()

    return report


if __name__ == "__main__":
    main()
