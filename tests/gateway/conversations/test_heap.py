"""Memory that nobody uses any more gets back to the system."""

import gc
import os
import platform
from pathlib import Path

import pytest

from gateway.conversations import heap

COUNT = 1000
FREED_BYTES = 60_000
KEPT_BYTES = 6_000


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries are told nothing")
def test_what_was_freed_between_what_is_in_use_goes_back() -> None:
    freed, kept = [], []
    for _ in range(COUNT):
        freed.append(b"x" * FREED_BYTES)
        kept.append(b"y" * KEPT_BYTES)
    full = resident_bytes()
    freed.clear()
    gc.collect()
    heap.give_back()
    assert full - resident_bytes() > COUNT * FREED_BYTES / 2
    assert len(kept) == COUNT


def test_without_anything_to_give_back_nothing_happens() -> None:
    heap.give_back()
    heap.give_back()
