"""The receipt of one request: parts that add up to the whole."""

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import EngineStamps, InferResponse, Phases, Usage
from gateway.observability.receipt import MOST_MEMBERS, STALL_NS, Receipt, in_ms
from gateway.observability.receipt_parts import NO_HOLD, Batch
from gateway.observability.request_record import Record
from gateway.observability.statistics import ModelStatistics
from tests.builders import text_request

MS = 1_000_000
SECS = 1_000 * MS


class Clock:
    """The clock of the modules, which a test sets."""

    def __init__(self) -> None:
        self.ns = SECS

    def __call__(self) -> int:
        return self.ns

    def at(self, ms: float) -> None:
        """Set the time, in milliseconds since the first byte."""
        self.ns = SECS + round(ms * MS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", found)
    return found


def begun(whole_ms: float = 1) -> Receipt:
    return Receipt(SECS, SECS + round(whole_ms * MS))


def accepted(receipt: Receipt, clock: Clock, ms: float = 2, model: str = "text") -> Record:
    """The record of the request, submitted at that time."""
    clock.at(ms)
    record = Record(ModelStatistics(), 1, 0, lambda _: None)
    receipt.accepted(text_request(model=model), "1", record)
    return record


def answer(record: Record, clock: Clock, ms: float, **fields: Any) -> None:
    """The last response, and the end."""
    clock.at(ms)
    record.responded(InferResponse(final=True, **fields))
    record.ended(None)


def sent(receipt: Receipt, clock: Clock, ms: float) -> dict[str, float]:
    clock.at(ms)
    receipt.sent()
    return in_ms(receipt.parts())


def of_tensors(receipt: Receipt, clock: Clock) -> None:
    record = accepted(receipt, clock)
    clock.at(5)
    record.started()
    answer(record, clock, 9, phases=Phases(1 * MS, 2 * MS, MS))


def of_engine(receipt: Receipt, clock: Clock) -> None:
    record = accepted(receipt, clock)
    clock.at(3)
    record.started()
    stamps = [SECS + ms * MS for ms in (4, 5, 6, 8)]
    answer(record, clock, 9, engine=EngineStamps(*stamps), usage=Usage(1, 3))


def of_another_machine(receipt: Receipt, clock: Clock) -> None:
    record = accepted(receipt, clock)
    clock.at(3)
    record.started()
    stamps = [77 * SECS + ms * MS for ms in (4, 5, 6, 8)]
    answer(record, clock, 9, engine=EngineStamps(*stamps), usage=Usage(1, 3))


def without_stamps(receipt: Receipt, clock: Clock) -> None:
    record = accepted(receipt, clock)
    clock.at(3)
    record.started()
    answer(record, clock, 9, usage=Usage(1, 3))


def from_the_cache(receipt: Receipt, clock: Clock) -> None:
    record = accepted(receipt, clock)
    record.hit(5)
    answer(record, clock, 9)


def never_begun(receipt: Receipt, clock: Clock) -> None:
    record = accepted(receipt, clock)
    record.released_ns = SECS + 4 * MS
    clock.at(9)
    record.ended(InferenceError(Code.CANCELLED, "Request was cancelled"))


def refused(receipt: Receipt, clock: Clock) -> None:
    clock.at(9)
    receipt.refused(text_request(), InferenceError(Code.UNAVAILABLE, "full"))


def of_another_request(receipt: Receipt, clock: Clock) -> None:
    clock.at(9)


OF_ENGINE = {"tokenize": 1, "engine_queue": 1, "prefill": 1, "generate": 2, "detokenize": 1}
CASES: dict[str, tuple[Callable[[Receipt, Clock], None], dict[str, float]]] = {
    "tensors": (of_tensors, {"decode": 1, "batch": 3, "input": 1, "infer": 2, "output": 1}),
    "an engine": (of_engine, {"decode": 1, "batch": 1, **OF_ENGINE}),
    "another machine": (
        of_another_machine,
        {"decode": 1, "batch": 1, **OF_ENGINE, "tokenize": 2, "detokenize": 0},
    ),
    "no stamps": (without_stamps, {"decode": 1, "batch": 1, "engine": 6}),
    "the cache": (from_the_cache, {"decode": 1, "cache": 7}),
    "cancelled": (never_begun, {"decode": 1, "queue": 2, "batch": 5}),
    "refused": (refused, {"decode": 8}),
    "a repeated request": (of_another_request, {"replay": 9}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_parts_are_the_differences_of_consecutive_stamps(clock: Clock, case: str) -> None:
    happens, expected = CASES[case]
    receipt = begun()
    happens(receipt, clock)
    encode = 0 if case == "a repeated request" else 1
    assert sent(receipt, clock, 10) == {
        "recv": 1.0,
        **expected,
        "encode": encode,
        "total": 10.0,
    }
    assert receipt.remote is (case == "another machine")


@pytest.mark.parametrize(
    ("stamps", "is_remote"),
    [((4, 5, 6, 8), False), ((0, 5, 6, 8), False), ((4, 5, 6, 99), True), ((1, 5, 6, 8), True)],
    ids=["inside", "unknown queue", "late end", "early begin"],
)
def test_an_engine_with_a_stamp_outside_of_the_execution_is_another_machine(
    clock: Clock, stamps: tuple[int, ...], is_remote: bool
) -> None:
    receipt = begun()
    record = accepted(receipt, clock)
    record.started()
    found = EngineStamps(*[each and SECS + each * MS for each in stamps])
    answer(record, clock, 9, engine=found)
    assert receipt.remote is is_remote


@pytest.mark.parametrize("seed", range(50))
def test_the_parts_add_up_for_any_stamps(clock: Clock, seed: int) -> None:
    chosen = random.Random(seed)
    stamps = [SECS + chosen.randrange(20 * MS) for _ in range(11)]
    receipt = Receipt(SECS, stamps[0])
    record = accepted(receipt, clock)
    record.started()
    record.engine = EngineStamps(*stamps[4:8])
    record.submitted_ns, record.released_ns, record.ended_ns = stamps[1:4]
    for since_ns, clock.ns in (sorted(stamps[7:9]), sorted(stamps[9:])):
        receipt.stalled(since_ns)
    clock.ns = stamps[8]
    receipt.sent()
    parts = receipt.parts()
    assert sum(ns for _, ns in parts) == stamps[8] - SECS
    assert all(ns >= 0 for _, ns in parts)
    told = in_ms(parts)
    total = told.pop("total")
    assert round(sum(told.values()) * 1000) == round(total * 1000)
    found = in_ms(receipt.parts())
    assert receipt.header() == ", ".join([f"{name};dur={ms}" for name, ms in found.items()])


@pytest.mark.parametrize("seed", range(60))
def test_the_header_of_a_short_request_has_the_parts_of_its_receipt(
    clock: Clock, seed: int
) -> None:
    """With and without a fair queue; a third of the requests has stamps in another order."""
    chosen = random.Random(seed)
    stamps = [SECS + chosen.randrange(5 * MS) for _ in range(6)]
    if seed % 3:
        stamps.sort()
    receipt = Receipt(SECS, stamps[0])
    record = accepted(receipt, clock)
    record.started()
    record.phases = Phases(chosen.randrange(MS), MS, chosen.randrange(MS // 4))
    record.submitted_ns, record.released_ns, record.started_ns, record.ended_ns = stamps[1:5]
    record.released_ns *= seed % 2
    clock.ns = stamps[5]
    told = in_ms(receipt.parts())
    assert receipt.header() == ", ".join([f"{name};dur={ms}" for name, ms in told.items()])


def test_only_an_execution_has_a_batch(clock: Clock) -> None:
    receipt = begun()
    record = accepted(receipt, clock)
    assert receipt.batch is None
    record.started()
    assert receipt.batch == Batch(1, {"": 1}, NO_HOLD)
    cached = begun()
    from_the_cache(cached, clock)
    assert cached.batch is None


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ([(6, 8.5)], {"generate": 0, "detokenize": 0.5, "stall": 2.5, "encode": 5}),
        ([(9, 13)], {"generate": 2, "stall": 4, "encode": 1}),
        ([(8, 11)], {"generate": 1, "stall": 3, "encode": 3}),
        ([(4, 4.5)], {"generate": 2, "encode": 5}),
    ],
    ids=["during the answer", "behind it", "across its end", "too short"],
)
def test_a_wait_for_the_client_is_a_part_of_its_own(
    clock: Clock, waits: list[tuple[float, float]], expected: dict[str, float]
) -> None:
    receipt = begun()
    record = accepted(receipt, clock)
    record.started()
    ended = False
    for since, until in waits:
        if until >= 9 and not ended:
            of_engine_from(record, clock)
            ended = True
        clock.at(until)
        receipt.stalled(SECS + round(since * MS))
    if not ended:
        of_engine_from(record, clock)
    found = sent(receipt, clock, 14)
    assert {name: found.get(name, 0) for name in expected} == expected
    assert ("stall" in found) is ("stall" in expected)
    assert found["total"] == 14


def of_engine_from(record: Record, clock: Clock) -> None:
    stamps = [SECS + ms * MS for ms in (3, 5, 6, 8)]
    answer(record, clock, 9, engine=EngineStamps(*stamps))


def test_preemptions_are_a_member(clock: Clock) -> None:
    receipt = begun()
    record = accepted(receipt, clock)
    record.started()
    answer(record, clock, 9, engine=EngineStamps(*[SECS + 3 * MS] * 4, preemptions=2))
    assert receipt.described()["preemptions"] == 2


def test_the_longest_chain_of_members_and_the_steps_between_are_the_whole(clock: Clock) -> None:
    """Members a (3 to 5 ms) and b (3 to 7) side by side, then c (8 to 9)."""
    receipt = begun()
    record = accepted(receipt, clock)
    clock.at(3)
    record.started()
    members: dict[str, Record] = {}
    for name, since, until in (("a", 3, 5), ("b", 3, 7), ("c", 8, 9)):
        clock.at(since)
        request = text_request(model=name)
        member = receipt.member(request)
        assert member is not None
        members[name] = accepted(member, clock, since, name)
        members[name].started()
        answer(members[name], clock, until)
    answer(record, clock, 10)
    found = sent(receipt, clock, 11)
    expected = {"recv": 1, "decode": 1, "batch": 1, "members": 5, "steps": 2, "encode": 1}
    assert found == {**expected, "total": 11}
    assert receipt.described()["members"] == 5
    told = receipt.described()["calls"]
    assert [(each["model"], each["longest"], each["total"]) for each in told] == [
        ("a", False, 2),
        ("b", True, 4),
        ("c", True, 1),
    ]


def test_members_that_take_no_time_are_on_the_chain_once(clock: Clock) -> None:
    receipt = begun()
    record = accepted(receipt, clock)
    record.started()
    for _ in range(MOST_MEMBERS):
        member = receipt.member(text_request())
        assert member is not None
        answer(accepted(member, clock), clock, 2)
    answer(record, clock, 3)
    assert len(receipt.chain) == MOST_MEMBERS
    assert sent(receipt, clock, 3)["members"] == 0


def test_a_receipt_lists_a_bounded_number_of_members(clock: Clock) -> None:
    receipt = begun()
    found = [receipt.member(text_request()) for _ in range(MOST_MEMBERS + 2)]
    assert Counter(each is None for each in found) == {False: MOST_MEMBERS, True: 2}


def test_a_receipt_ends_once(clock: Clock) -> None:
    kept: list[Receipt] = []
    receipt = Receipt(SECS, SECS, keep=kept.append)
    sent(receipt, clock, 3)
    assert sent(receipt, clock, 8)["total"] == 3
    assert kept == [receipt]


def test_the_header_has_all_parts_and_the_total(clock: Clock) -> None:
    receipt = begun()
    of_tensors(receipt, clock)
    sent(receipt, clock, 10.5)
    assert receipt.header() == (
        "recv;dur=1.0, decode;dur=1.0, batch;dur=3.0, input;dur=1.0, infer;dur=2.0, "
        "output;dur=1.0, encode;dur=1.5, total;dur=10.5"
    )
    assert STALL_NS == MS
