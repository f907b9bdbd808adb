"""The memory budget of histories, and the heap that they leave."""

import gc
import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.conversations.history import TRIM_BYTES, ByteLimits, MemoryBudget, trim_heap

SPARED = object()
COUNT = 1000
FREED_BYTES = 60_000
KEPT_BYTES = 6_000


def budget(total: int, *idle: int) -> MemoryBudget:
    """A budget with idle histories of these sizes."""
    left = list(idle)

    def evict(spare: object) -> bool:
        if not left or spare is not SPARED:
            return False
        found.free(left.pop(0))
        return True

    found = MemoryBudget(ByteLimits(each=total, total=total), evict)
    found.book(sum(idle))
    return found


def test_a_budget_has_room_up_to_its_limit() -> None:
    found = budget(10)
    assert found.make_room(10)
    assert not found.make_room(11)
    found.book(4)
    assert found.make_room(6)
    assert not found.make_room(7)


def test_a_budget_evicts_no_more_than_it_must() -> None:
    found = budget(10, 3, 3, 3)
    assert found.make_room(4, spare=SPARED)
    assert found.used == 6
    assert found.make_room(10, spare=SPARED)
    assert found.used == 0


def test_a_spared_conversation_is_not_evicted() -> None:
    found = budget(10, 9)
    assert not found.make_room(2, spare="another")
    assert found.used == 9


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the trims of the heap."""
    calls: list[None] = []
    monkeypatch.setattr("gateway.conversations.history.trim_heap", lambda: calls.append(None))
    return lambda: len(calls)


def test_the_heap_is_trimmed_after_enough_bytes_are_freed(trims: Callable[[], int]) -> None:
    found = budget(10 * TRIM_BYTES, 9 * TRIM_BYTES)
    found.free(TRIM_BYTES - 1)
    assert trims() == 0
    found.free(1)
    assert trims() == 1
    found.free(TRIM_BYTES - 1)
    assert trims() == 1
    found.free(3 * TRIM_BYTES)
    assert trims() == 2


def test_bytes_that_are_taken_back_trim_nothing(trims: Callable[[], int]) -> None:
    found = budget(10 * TRIM_BYTES)
    for _ in range(5):
        found.book(TRIM_BYTES)
        found.book(-TRIM_BYTES)
    assert trims() == 0


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap is trimmed")
def test_a_trim_returns_memory_between_live_objects() -> None:
    freed, kept = [], []
    for _ in range(COUNT):
        freed.append(b"x" * FREED_BYTES)
        kept.append(b"y" * KEPT_BYTES)
    full = resident_bytes()
    freed.clear()
    gc.collect()
    trim_heap()
    assert full - resident_bytes() > COUNT * FREED_BYTES / 2
    assert len(kept) == COUNT


def test_a_second_trim_is_harmless() -> None:
    trim_heap()
    trim_heap()
