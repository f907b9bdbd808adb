"""How many processors are there for this process?"""

import os


def processors() -> int:
    """Those that it may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
