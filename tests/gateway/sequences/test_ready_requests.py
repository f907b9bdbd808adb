import pytest

from gateway.config import ModelConfig
from gateway.config.scheduling import StrategyDirect, StrategyOldest
from gateway.messages import SequenceTag
from gateway.sequences.ready_requests import ReadyCandidates, ReadySlots, Row, RowDecision
from gateway.sequences.table import OpenSequence, SequenceSlot
from tests.gateway.schedulers.queues import MS, waiting
from tests.gateway.sequences.parts import part

MODEL = ModelConfig(max_batch_size=4)


def sequence(
    number: int, key: object = None, arrived_ms: float = 0, flags: str = "", begun: bool = True
) -> OpenSequence:
    """One that has a request, in the slot of its number."""
    found = OpenSequence(SequenceTag(number), slot=SequenceSlot("owner", number), begun=begun)
    request = waiting(str(number), arrived_ms=arrived_ms, key=key)
    entry = request.entry
    request.entry = type(entry)(part(number, str(number), flags), entry.stream, entry.record)
    found.waiting.append(request)
    return found


def slots(delay_ms: int = 0, utilization: float = 0) -> ReadySlots:
    strategy = StrategyDirect(
        max_queue_delay_microseconds=delay_ms * 1000, minimum_slot_utilization=utilization
    )
    return ReadySlots(MODEL, strategy)


def numbers(found: RowDecision) -> list[object]:
    return [row and row.sequence.tag.correlation_id for row in found.rows]


# Direct.


def test_a_batch_has_a_row_for_each_slot_up_to_the_last_that_is_ready() -> None:
    ready = slots()
    assert not ready
    for number in (3, 1):
        assert not ready.offer(sequence(number))
    assert ready
    assert numbers(ready.decide(0)) == [None, 1, None, 3]


def test_the_longest_ready_request_decides_the_batch() -> None:
    ready = slots()
    for number, key in ((0, "narrow"), (1, "wide"), (2, "narrow"), (3, "wide")):
        ready.offer(sequence(number, key))
    found = ready.decide(0)
    assert numbers(found) == [0, None, 2, None]
    ready.take(found.rows)
    assert numbers(ready.decide(0)) == [None, 1, None, 3]


def test_the_longest_ready_request_is_not_overtaken() -> None:
    ready = slots()
    narrow, wide = sequence(0, "narrow"), sequence(1, "wide")
    for each in (narrow, wide):
        ready.offer(each)
    ready.take(ready.decide(0).rows)
    narrow.waiting.extend(sequence(0, "narrow").waiting)
    ready.offer(narrow)
    assert numbers(ready.decide(0)) == [None, 1]


def test_a_taken_sequence_is_busy_and_an_ended_one_releases_its_slot() -> None:
    ready = slots()
    going_on, ending = sequence(0), sequence(1, flags="end")
    for each in (going_on, ending):
        ready.offer(each)
    assert ready.take(ready.decide(0).rows) == [ending]
    assert (going_on.busy, ending.busy, bool(ready)) == (True, True, False)
    assert not going_on.waiting


def test_to_offer_twice_is_to_offer_once() -> None:
    ready = slots()
    one = sequence(0)
    ready.offer(one)
    ready.offer(one)
    assert numbers(ready.decide(0)) == [0]
    assert ready.drop(one) is None
    assert not ready
    assert list(one.waiting)


@pytest.mark.parametrize(
    ("delay_ms", "utilization", "ready", "now_ms", "until_ms"),
    [
        (0, 0.0, 1, 0, 0),
        (0, 1.0, 1, 0, 0),
        (50, 0.0, 1, 0, 0),
        (50, 0.5, 1, 20, 60),
        (50, 0.5, 2, 20, 0),
        (50, 0.75, 2, 59, 60),
        (50, 0.75, 2, 60, 0),
        (50, 0.75, 3, 20, 0),
    ],
)
def test_a_direct_batch_waits_only_if_both_a_delay_and_a_utilization_are_given(
    delay_ms: int, utilization: float, ready: int, now_ms: int, until_ms: int
) -> None:
    found = slots(delay_ms, utilization)
    for number in range(ready):
        found.offer(sequence(number, arrived_ms=10 + number))
    decision = found.decide(now_ms * MS)
    assert decision.until_ns == until_ms * MS
    assert bool(decision.rows) is not bool(until_ms)


# Oldest.


def candidates(
    preferred: tuple[int, ...] = (), delay_ms: int = 0, max_batch_size: int = 4
) -> ReadyCandidates:
    strategy = StrategyOldest(
        preferred_batch_size=preferred, max_queue_delay_microseconds=delay_ms * 1000
    )
    return ReadyCandidates(ModelConfig(max_batch_size=max_batch_size), strategy)


def test_candidates_execute_in_the_order_they_came() -> None:
    ready = candidates()
    for number in (3, 1, 2, 5, 4):
        ready.offer(sequence(number))
    found = ready.decide(0)
    assert numbers(found) == [3, 1, 2, 5]
    assert ready.take(found.rows) == []
    assert numbers(ready.decide(0)) == [4]


def test_a_candidate_is_busy_and_needs_its_slot_no_more_if_it_is_the_last() -> None:
    ready = candidates()
    going_on, ending = sequence(1), sequence(2, flags="end")
    assert (ready.offer(going_on), ready.offer(ending)) == (False, True)
    assert (going_on.busy, ending.busy) == (True, True)
    assert not going_on.waiting


@pytest.mark.parametrize(
    ("count", "now_ms", "batch", "until_ms"),
    [(1, 0, 0, 50), (2, 0, 2, 0), (3, 0, 2, 0), (1, 50, 1, 0), (3, 50, 3, 0)],
)
def test_candidates_wait_as_requests_of_the_dynamic_batcher(
    count: int, now_ms: int, batch: int, until_ms: int
) -> None:
    ready = candidates(preferred=(2,), delay_ms=50)
    for number in range(count):
        ready.offer(sequence(number))
    decision = ready.decide(now_ms * MS)
    assert (len(decision.rows), decision.until_ns) == (batch, until_ms * MS)


def test_a_candidate_that_is_dropped_is_given_back() -> None:
    ready = candidates()
    gone, other = sequence(1), sequence(2)
    request = gone.waiting[0]
    for each in (gone, other):
        ready.offer(each)
    assert ready.drop(gone) is request
    assert (gone.busy, ready.drop(gone)) == (False, None)
    assert numbers(ready.decide(0)) == [2]
    assert ready.sequences == [other]


@pytest.mark.parametrize("ready", [slots(), candidates()], ids=["direct", "oldest"])
def test_a_sequence_that_has_not_begun_is_removed_unchanged(
    ready: ReadySlots | ReadyCandidates,
) -> None:
    begun, unbegun = sequence(1), sequence(2, begun=False)
    request = unbegun.waiting[0]
    for each in (begun, unbegun):
        ready.offer(each)
    assert ready.drop_unbegun() == [unbegun]
    assert (list(unbegun.waiting), unbegun.busy) == ([request], False)
    assert [row.sequence for row in ready.decide(0).rows if isinstance(row, Row)] == [begun]
