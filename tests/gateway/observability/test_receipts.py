"""The kept receipts of a server: whose they are, how many there are, and their words."""

import re
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.json_lines import MOST_CHARS
from gateway.messages import EngineStamps, InferRequest
from gateway.observability import receipts as module
from gateway.observability.receipt import Receipt, receipt_of
from gateway.observability.receipt_parts import (
    NO_HOLD,
    NOT_KNOWN,
    SHOWN_TENANTS,
    Bound,
    Hold,
    note_batch,
)
from gateway.observability.receipts import BATCH_WAITS, WAITS, Receipts, account
from gateway.observability.request_record import Record
from gateway.observability.statistics import ModelStatistics
from gateway.policy.caller import Caller
from tests.builders import ScriptedInstance, soon, text_request, text_response
from tests.conftest import Serve

MS = 1_000_000
"""Nanoseconds."""


def kept(receipts: Receipts, tenant: str, request_id: str) -> Receipt:
    """A request of that tenant that was refused."""
    request = asked(receipts, tenant, request_id)
    receipt = receipt_of(request)
    assert receipt is not None
    receipt.refused(request, InferenceError(Code.UNAVAILABLE, "full"))
    receipt.sent()
    return receipt


def asked(receipts: Receipts, tenant: str = "", request_id: str = "a") -> InferRequest:
    caller = Caller(tenant=tenant) if tenant else None
    now_ns = time.perf_counter_ns()
    return receipts.begin(text_request(id=request_id, caller=caller), now_ns, now_ns, wished=True)


def accepted(statistics: ModelStatistics) -> tuple[InferRequest, Receipt, Record]:
    """A request that its model has accepted, its receipt, and its record."""
    request = asked(Receipts())
    receipt, record = receipt_of(request), Record(statistics, 1, 0, lambda _: None)
    assert receipt is not None
    receipt.accepted(request, "1", record)
    return request, receipt, record


def test_only_the_wish_and_the_option_make_a_receipt() -> None:
    receipts = Receipts()
    plain = text_request(parameters={"a": 1})
    assert receipts.begin(plain, 1, 2, wished=False) is plain
    assert plain.receipt is None
    assert receipt_of(Receipts(every=True).begin(plain, 1, 2, wished=False)) is not None


@pytest.mark.parametrize(
    ("value", "is_wish"), [(True, True), (False, False), (1, False), ("true", False)], ids=repr
)
def test_the_parameter_timing_is_a_wish_only_if_it_is_true(value: Any, *, is_wish: bool) -> None:
    request = text_request(parameters={"timing": value, "a": 1})
    found = Receipts().begin(request, 1, 2, wished=False)
    assert (found.receipt is not None) is is_wish
    assert found.parameters == ({"a": 1} if is_wish else {"timing": value, "a": 1})
    assert request.parameters == {"timing": value, "a": 1}


def test_a_receipt_is_known_to_its_tenant_alone() -> None:
    receipts = Receipts()
    kept(receipts, "a", "x")
    assert receipts.why("a", "x") is not None
    assert receipts.why("b", "x") is None
    assert receipts.why("", "x") is None
    assert receipts.why("a", "y") is None


def test_a_request_without_an_id_is_not_kept() -> None:
    receipts = Receipts()
    kept(receipts, "a", "")
    assert len(receipts) == 0


def test_a_long_id_is_not_kept_and_a_long_failure_is_cut() -> None:
    receipts, error = Receipts(), InferenceError(Code.INTERNAL, "x" * 10_000)
    refused, failed = (receipt_of(asked(receipts, request_id=name)) for name in "rf")
    assert refused is not None
    assert failed is not None
    for size in (MOST_CHARS, MOST_CHARS + 1):
        kept(receipts, "a", "i" * size)
    assert len(receipts) == 1
    refused.refused(text_request(id="r"), error)
    record = Record(ModelStatistics(), 1, 0, lambda _: None)
    failed.accepted(text_request(id="f"), "1", record)
    record.ended(error)
    for receipt in (refused, failed):
        receipt.sent()
        assert receipt.failure == (Code.INTERNAL, "x" * MOST_CHARS + "...")


def test_of_requests_with_one_id_the_last_is_known() -> None:
    receipts = Receipts()
    kept(receipts, "a", "x")
    kept(receipts, "a", "x")
    assert len(receipts) == 1


def test_the_oldest_of_a_tenant_and_of_all_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OF_TENANT", 2)
    monkeypatch.setattr(module, "MOST_KEPT", 4)
    receipts = Receipts()
    for request_id in "123":
        kept(receipts, "a", request_id)
    assert [receipts.why("a", each) is not None for each in "123"] == [False, True, True]
    for tenant in "bcd":
        kept(receipts, tenant, "1")
    assert len(receipts) == 4
    assert [receipts.why("a", each) is not None for each in "23"] == [False, True]
    kept(receipts, "e", "1")
    kept(receipts, "f", "1")
    assert len(receipts) == 4
    assert receipts.why("a", "3") is None


def test_each_part_has_words() -> None:
    folder = Path(module.__file__ or "").parent
    source = "".join((folder / name).read_text() for name in ("receipt.py", "receipt_parts.py"))
    named = set(re.findall(r'\("([a-z_]+)", (?!self\.asked)', source))
    assert named <= WAITS.keys()
    assert {"recv", "batch", "prefill", "encode", "stall"} <= named


def test_a_refused_request_says_so() -> None:
    receipts = Receipts()
    kept(receipts, "", "x")
    found = receipts.why("", "x")
    assert found is not None
    assert found["status"] == "refused: full"
    assert "It was refused before it was queued." in found["why"]


async def test_a_request_says_what_it_waited_for_and_how_it_ended(serve: Serve) -> None:
    receipts, instance = Receipts(), ScriptedInstance()
    model = serve(instance)
    request = asked(receipts)
    receipt = receipt_of(request)
    assert receipt is not None
    with model.submit(request) as stream:
        execution = await instance.begun()
        execution.crash(InferenceError(Code.INTERNAL, "broken"))
        with pytest.raises(InferenceError):
            await soon(stream.only())
    receipt.sent()
    found = receipts.why("", "a")
    assert found is not None
    assert (found["model"], found["status"]) == ("text", "failed: broken")
    assert found["batch"] == {
        "rows": 1,
        "requests": 1,
        "of_other_tenants": 0,
        "other_tenants": [],
    }
    (sentence,) = found["why"]
    assert re.fullmatch(r"[\d.]+ of its [\d.]+ ms it waited .*\.", sentence)


def test_the_others_of_a_batch_are_counted_by_tenant() -> None:
    receipts = Receipts()
    requests = [asked(receipts, tenant, f"{tenant}1") for tenant in "aab"]
    requests.append(replace(requests[0], receipt=None))
    note_batch(requests, 7)
    for request in requests[:3]:
        receipt = receipt_of(request)
        assert receipt is not None
        receipt.accepted(request, "1", Record(ModelStatistics(), 1, 0, lambda _: None))
        receipt.sent()
    found = receipts.why("a", "a1")
    assert found is not None
    assert found["batch"] == {
        "rows": 7,
        "requests": 4,
        "of_other_tenants": 1,
        "other_tenants": ["b"],
    }
    assert found["why"][-1] == (
        "Its batch of 7 rows had 3 further requests, 1 of them of other tenants."
    )


async def test_the_account_of_a_request_counts_all_that_its_engine_executed(
    serve: Serve,
) -> None:
    receipts, instance = Receipts(), ScriptedInstance(concurrency=None)
    model = serve(instance)
    for number, tenants in enumerate(("aab", "")):
        others = [text_request(caller=Caller(tenant=each)) for each in tenants]
        request = asked(receipts, "a", str(number))
        receipt = receipt_of(request)
        assert receipt is not None
        with ExitStack() as streams:
            for each in others:
                streams.enter_context(model.submit(each))
            stream = streams.enter_context(model.submit(request))
            executions = [await instance.begun() for _ in (*others, request)]
            for execution in executions:
                execution.answer(text_response("x", final=True))
                execution.end()
            await soon(stream.only())
            await soon(executions[0].stopped.wait())
        receipt.sent()
    shared, alone = (receipts.why("a", each) for each in "01")
    assert shared is not None
    assert alone is not None
    assert shared["why"][-1] == (
        "When it began, its instance executed 3 further requests, 1 of them of other tenants."
    )
    assert shared["batch"] == {
        "rows": 1,
        "requests": 4,
        "of_other_tenants": 1,
        "other_tenants": ["b"],
    }
    assert alone["batch"]["requests"] == 1


def test_an_account_of_many_tenants_is_small() -> None:
    receipts = Receipts()
    request = asked(receipts, "own", "x")
    receipt = receipt_of(request)
    assert receipt is not None
    tenants = {f"t{n:04}": 2 for n in range(1000)} | {"own": 3}
    note_batch([request], 1, shared=tenants)
    receipt.accepted(request, "1", Record(ModelStatistics(), 1, 0, lambda _: None))
    receipt.sent()
    assert receipt.batch is not None
    assert len(receipt.batch.tenants) <= SHOWN_TENANTS + 2
    found = receipts.why("own", "x")
    assert found is not None
    assert found["batch"]["requests"] == 2003
    assert found["batch"]["of_other_tenants"] == 2000
    assert found["batch"]["other_tenants"] == [f"t{n:04}" for n in range(SHOWN_TENANTS)]


@pytest.mark.parametrize(
    ("hold", "words"),
    [
        (NO_HOLD, "for an instance: the limit is the number of instances"),
        (Hold(Bound.DELAY, 5 * MS), BATCH_WAITS[Bound.DELAY]),
        (Hold(Bound.DELAY, 0), BATCH_WAITS[Bound.DELAY]),
        (Hold(Bound.DELAY, 80 * MS), BATCH_WAITS[Bound.INSTANCES]),
        (Hold(Bound.TURN, 5 * MS), BATCH_WAITS[Bound.TURN]),
        (NOT_KNOWN, WAITS["batch"]),
    ],
    ids=str,
)
def test_the_wait_for_an_execution_names_the_limit_that_bound(
    statistics: ModelStatistics, hold: Hold, words: str
) -> None:
    """The request waits from 1 ms to 101 ms; without an earlier end all of that counts."""
    request, receipt, record = accepted(statistics)
    note_batch([request], 1, hold)
    receipt.begun_ns, receipt.whole_ns = 0, MS // 2
    record.submitted_ns, record.started_ns = MS, 101 * MS
    record.ended_ns = receipt.sent_ns = 102 * MS
    assert account(receipt)["why"] == [f"100.0 of its 102.0 ms it waited {words}."]


@pytest.mark.parametrize(
    ("limit", "words"),
    [("max_num_seqs (8)", "the limit is max_num_seqs (8)"), ("", WAITS["engine_queue"])],
)
def test_the_wait_in_the_queue_of_an_engine_names_its_limit(
    statistics: ModelStatistics, limit: str, words: str
) -> None:
    _, receipt, record = accepted(statistics)
    receipt.begun_ns = receipt.whole_ns = 0
    record.submitted_ns = record.started_ns = MS
    record.engine = EngineStamps(2 * MS, 92 * MS, 93 * MS, 94 * MS, limit=limit)
    record.ended_ns = receipt.sent_ns = 95 * MS
    (sentence,) = account(receipt)["why"]
    assert sentence.startswith("90.0 of its 95.0 ms it waited in the queue of the engine: ")
    assert sentence.endswith(f"{words}.")
