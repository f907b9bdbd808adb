"""A file in which the clients of one engine see how many requests each has.

vLLM's limit of waiting requests (`max_num_queued_reqs`) is one for all of them.
"""

import mmap
from pathlib import Path

from vllm.v1.engine.admission_control import SharedAdmissionStats


def write_counters(file: Path, clients: int) -> None:
    """Make the file: nobody has a request."""
    size = SharedAdmissionStats.num_counters(clients) * SharedAdmissionStats.COUNTER_BYTES
    file.write_bytes(bytes(size))


def shared_counters(file: Path) -> memoryview:
    """The counters of a file, for this process and for those that share it."""
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")
