import asyncio

from gateway.messages import SequenceTag
from gateway.schedulers.queue import QueuedRequest
from gateway.sequences.table import OpenSequence, SequenceTable
from tests.builders import settle, soon
from tests.gateway.schedulers.queues import MS, waiting

IDLE_MS = 100


def table() -> SequenceTable:
    return SequenceTable(IDLE_MS * 1000)


def push(
    found: SequenceTable, sequence: int, flags: str = "", at_ms: int = 0, timeout_ms: int = 0
) -> OpenSequence:
    tag = SequenceTag(sequence, start="start" in flags, end="end" in flags)
    return found.push(waiting(str(sequence)), tag, timeout_ms * 1000, at_ms * MS)


def place(sequence: OpenSequence) -> tuple[object, int] | None:
    slot = sequence.slot
    return None if slot is None else (slot.owner, slot.number)


def done(sequence: OpenSequence) -> None:
    """Its requests have been executed."""
    sequence.waiting.clear()


def texts(requests: list[QueuedRequest]) -> list[str]:
    return [each.entry.request.id for each in requests]


def test_a_sequence_gets_the_lowest_slot_of_all_owners() -> None:
    found = table()
    found.add("a", 2)
    found.add("b", 2)
    places = [place(push(found, number, "start")) for number in range(1, 6)]
    assert places == [("a", 0), ("b", 0), ("a", 1), ("b", 1), None]


def test_slots_of_a_busy_owner_are_taken_last() -> None:
    busy: set[object] = {"a"}
    found = SequenceTable(IDLE_MS * 1000, busy=lambda owner: owner in busy)
    found.add("a", 2)
    found.add("b", 1)
    places = [place(push(found, 1, "start")), place(push(found, 2, "start"))]
    assert places == [("b", 0), ("a", 0)]
    third, fourth = push(found, 3, "start"), push(found, 4, "start")
    assert (place(third), place(fourth)) == (("a", 1), None)


def test_without_a_time_no_sequence_is_ever_idle() -> None:
    found = SequenceTable(0)
    found.add("a", 1)
    push(found, 1, "start")
    assert found.idle_ns == 0
    assert found.close_idle(10**18) == []


def test_a_released_slot_is_taken_again() -> None:
    found = table()
    found.add("a", 3)
    first, second = push(found, 1, "start"), push(found, 2, "start")
    assert found.release(first, 0) is None
    assert place(first) is None
    assert place(push(found, 3, "start")) == ("a", 0)
    assert place(second) == ("a", 1)


def test_requests_of_a_sequence_keep_their_order_and_their_slot() -> None:
    found = table()
    found.add("a", 2)
    sequence = push(found, 1, "start")
    assert push(found, 1) is sequence
    assert push(found, 1, "start") is sequence
    assert len(sequence.waiting) == 3
    assert all(each.queued for each in sequence.waiting)


def test_after_its_end_an_id_is_unknown_and_may_begin_anew() -> None:
    found = table()
    found.add("a", 2)
    sequence = push(found, 1, "start")
    assert found.knows(1)
    assert push(found, 1, "end") is sequence
    assert not found.knows(1)
    another = push(found, 1, "start")
    assert another is not sequence
    assert (place(sequence), place(another)) == (("a", 0), ("a", 1))


def test_the_backlog_is_first_in_first_out() -> None:
    found = table()
    found.add("a", 1)
    first = push(found, 1, "start end")
    later = [push(found, number, "start") for number in (2, 3)]
    assert [place(each) for each in later] == [None, None]
    assert found.knows(2)
    assert push(found, 2) is later[0]
    done(first)
    assert found.release(first, 0) is later[0]
    assert place(later[0]) == ("a", 0)
    assert found.release(later[0], 0) is later[1]


def test_added_slots_are_given_to_the_backlog_by_fill() -> None:
    found = table()
    waiters = [push(found, number, "start") for number in (1, 2, 3)]
    found.add("a", 2)
    assert [found.fill(0), found.fill(0), found.fill(0)] == [waiters[0], waiters[1], None]
    assert place(waiters[2]) is None


# Times.


def test_a_sequence_without_requests_for_too_long_is_closed() -> None:
    found = table()
    found.add("a", 2)
    assert found.idle_ns == 0
    first = push(found, 1, "start", at_ms=0)
    second = push(found, 2, "start", at_ms=10)
    assert found.idle_ns == IDLE_MS * MS
    push(found, 1, at_ms=20)
    assert found.idle_ns == (10 + IDLE_MS) * MS
    assert found.close_idle((9 + IDLE_MS) * MS) == []
    assert found.close_idle((10 + IDLE_MS) * MS) == [second]
    assert (found.knows(1), found.knows(2)) == (True, False)
    assert found.close_idle((20 + IDLE_MS) * MS) == [first]
    assert found.idle_ns == 0


def test_sequences_in_the_backlog_are_never_idle() -> None:
    found = table()
    found.add("a", 1)
    first = push(found, 1, "start end", at_ms=0)
    second = push(found, 2, "start", at_ms=0)
    assert found.close_idle(10 * IDLE_MS * MS) == []
    assert found.release(first, 10 * IDLE_MS * MS) is second
    assert found.idle_ns == 11 * IDLE_MS * MS


def test_a_sequence_in_the_backlog_waits_until_its_shortest_timeout() -> None:
    found = table()
    found.add("a", 1)
    push(found, 1, "start")
    push(found, 2, "start", at_ms=0, timeout_ms=50)
    push(found, 2, at_ms=10, timeout_ms=20)
    push(found, 2, at_ms=20, timeout_ms=90)
    push(found, 3, "start", at_ms=0)
    assert found.deadline_ns == 30 * MS
    assert found.expire(29 * MS) == []
    late = found.expire(30 * MS)
    assert texts(late) == ["2", "2", "2"]
    assert not any(each.queued for each in late)
    assert (found.knows(2), found.knows(3), found.deadline_ns) == (False, True, 0)


def test_in_a_slot_nothing_times_out() -> None:
    found = table()
    found.add("a", 1)
    first = push(found, 1, "start end", timeout_ms=1)
    second = push(found, 2, "start", timeout_ms=1)
    found.release(first, 0)
    assert found.deadline_ns == 0
    push(found, 2, timeout_ms=1)
    assert found.expire(10 * MS) == []
    assert len(second.waiting) == 2


# Giving up, and owners that go.


def test_a_dropped_sequence_leaves_the_backlog() -> None:
    found = table()
    found.add("a", 1)
    first = push(found, 1, "start end")
    second, third = push(found, 2, "start"), push(found, 3, "start")
    push(found, 2)
    assert texts(found.drop(second)) == ["2", "2"]
    assert not found.knows(2)
    assert found.release(first, 0) is third


def test_a_sequence_can_be_cut_at_any_request() -> None:
    found = table()
    found.add("a", 1)
    sequence = push(found, 1, "start")
    push(found, 1)
    push(found, 1)
    first, second, third = sequence.waiting
    assert found.cut(sequence, second) == [second, third]
    assert list(sequence.waiting) == [first]
    assert (first.queued, second.queued, third.queued) == (True, False, False)
    assert not found.knows(1)
    assert place(sequence) == ("a", 0)


async def test_a_wait_for_open_sequences_ends_when_the_last_one_closes() -> None:
    found = table()
    await soon(found.ended())
    for number in (1, 2):
        push(found, number, "start")
    ended = asyncio.create_task(found.ended())
    push(found, 1, "end")
    await settle()
    assert not ended.done()
    push(found, 2, "end")
    await soon(ended)


def test_closing_is_idempotent() -> None:
    found = table()
    found.add("a", 2)
    sequence = push(found, 1, "start end")
    push(found, 1, "start")
    found.close(sequence)
    assert found.knows(1)
    assert found.drop(sequence)
    assert found.knows(1)


def test_a_retired_slot_is_not_taken_again() -> None:
    found = table()
    slots = found.add("a", 2)
    inside = push(found, 1, "start")
    found.retire(slots)
    outside = push(found, 2, "start")
    assert place(outside) is None
    assert push(found, 1) is inside
    assert found.release(inside, 0) is None
    assert (place(outside), slots[0].sequence) == (None, None)
    found.add("b", 1)
    assert found.fill(0) is outside
    assert place(outside) == ("b", 0)


def test_sequences_sent_back_are_first_and_keep_their_order() -> None:
    found = table()
    slots = found.add("a", 2)
    begun = [push(found, number, "start") for number in (1, 2)]
    push(found, 3, "start")
    found.retire(slots)
    found.send_back(begun)
    assert found.idle_ns == 0
    found.add("b", 3)
    taken = [found.fill(0) for _ in range(3)]
    assert [each and each.tag.correlation_id for each in taken] == [1, 2, 3]
    assert all(each and place(each) for each in taken)
