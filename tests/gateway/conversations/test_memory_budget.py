"""What histories may take together, and when what they leave goes back to the system."""

from collections.abc import Callable

import pytest

from gateway.conversations.memory_budget import KEPT_BYTES, ByteLimits, Room

NOBODY = object()


def room(total: int, *idle: int) -> Room:
    """A room with so much in it: one history in use, and others whose sizes are told."""
    left = list(idle)

    def forget(spare: object) -> bool:
        if not left or spare is not NOBODY:
            return False
        found.leave(left.pop(0))
        return True

    found = Room(ByteLimits(each=total, total=total), forget)
    found.book(sum(idle))
    return found


def test_at_the_limit_there_is_room_and_beyond_it_there_is_none() -> None:
    found = room(10)
    assert found.make(10)
    assert not found.make(11)
    found.book(4)
    assert found.make(6)
    assert not found.make(7)


def test_no_more_goes_than_has_to() -> None:
    found = room(10, 3, 3, 3)
    assert found.make(4, spare=NOBODY)
    assert found.taken == 6
    assert found.make(10, spare=NOBODY)
    assert found.taken == 0


def test_whoever_is_to_be_spared_is() -> None:
    found = room(10, 9)
    assert not found.make(2, spare="somebody")
    assert found.taken == 9


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often memory has gone back."""
    calls: list[None] = []
    monkeypatch.setattr("gateway.conversations.heap.give_back", lambda: calls.append(None))
    return lambda: len(calls)


def test_memory_goes_back_once_enough_has_been_left(given_back: Callable[[], int]) -> None:
    found = room(10 * KEPT_BYTES, 9 * KEPT_BYTES)
    found.leave(KEPT_BYTES - 1)
    assert given_back() == 0
    found.leave(1)
    assert given_back() == 1
    found.leave(KEPT_BYTES - 1)
    assert given_back() == 1
    found.leave(3 * KEPT_BYTES)
    assert given_back() == 2


def test_what_only_comes_and_goes_leaves_nothing(given_back: Callable[[], int]) -> None:
    found = room(10 * KEPT_BYTES)
    for _ in range(5):
        found.book(KEPT_BYTES)
        found.book(-KEPT_BYTES)
    assert given_back() == 0
