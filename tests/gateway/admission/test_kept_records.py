"""Records that outlast their requests hold neither a model nor a scheduler."""

import gc
import time
from collections import deque
from types import UnionType

import pytest

from gateway.models.model import Model
from gateway.observability.receipt import Receipt
from gateway.observability.receipts import Receipts
from gateway.observability.span_trace import SpanTrace
from gateway.observability.trace import Trace
from gateway.observability.traceparent import NumberedIds
from gateway.policy.tenants import TenantRules
from gateway.schedulers.scheduler import Scheduler
from tests.builders import settle
from tests.conftest import Serve, tasks_left
from tests.gateway.admission.twin_planes import BROKEN, NoAllowances, Plane, answer_of, request

LIMITED = {"a": TenantRules(requests_per_minute=1e9)}


def held(root: object, kinds: UnionType = Model | Scheduler) -> list[str]:
    """The types of those objects that an object reaches, but for types and code."""
    seen, todo, found = {id(root)}, deque([root]), []
    while todo:
        each = todo.popleft()
        if isinstance(each, kinds):
            found.append(type(each).__name__)
        elif not isinstance(each, type) and type(each).__name__ not in ("module", "function"):
            referents = [other for other in gc.get_referents(each) if id(other) not in seen]
            seen.update(map(id, referents))
            todo.extend(referents)
    return found


async def sent(plane: Plane, receipts: Receipts, name: str, tokens: int) -> Receipt:
    """The receipt of a request whose answer is sent."""
    now = time.perf_counter_ns()
    asked = receipts.begin(request(name, 0, "a"), now, now, wished=True)
    receipt = asked.receipt
    assert isinstance(receipt, Receipt)
    plane.streams[name] = plane.dataplane.infer(asked)
    await settle()
    plane.answer(name, answer_of(100, tokens))
    await settle()
    receipt.sent()
    return receipt


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("has_allowances", [True, False])
async def test_a_receipt_that_is_kept_holds_neither_model_nor_scheduler(
    serve: Serve, has_allowances: bool, tokens: int
) -> None:
    plane, receipts = Plane(serve, [None], LIMITED), Receipts(every=True)
    if not has_allowances:
        plane.models[0].allowances = NoAllowances()
    await settle()
    found = [await sent(plane, receipts, f"r{number}", 0) for number in range(3)]
    found.append(await sent(plane, receipts, "last", tokens))
    assert len(receipts) == 4
    assert [held(each) for each in found] == 4 * [[]]
    assert held(plane) != []


async def test_an_execution_that_ends_after_its_model_is_closed_leaves_nothing_noted(
    serve: Serve,
) -> None:
    plane = Plane(serve, [None], LIMITED)
    await settle()
    plane.infer("first", 0, "a")
    await settle()
    plane.answer("first", answer_of(100))
    plane.infer("slow", 0, "a")
    await settle()
    reader = plane.instances[0].begun.pop("slow")  # so that it is not abandoned at once
    await plane.models[0].close()
    assert plane.streams["slow"].done
    (running,) = (task for task in tasks_left() if "Model.run" in repr(task))
    running.cancel()
    await settle()
    reader.over(None)
    await settle()
    assert running.done()
    assert plane.tenants.ledger.events == []


async def test_a_noted_request_that_has_ended_holds_no_trace(serve: Serve) -> None:
    """The trace may have its tensors, and the error of a failed one its traceback."""
    plane, ended = Plane(serve, [None], LIMITED), list[Trace]()
    await settle()
    for number, name in enumerate(("first", "second", "answered", "failed")):
        trace = SpanTrace(number, NumberedIds(), ended.append)
        plane.streams[name] = plane.dataplane.infer(request(name, 0, "a"), None, trace)
        await settle()
        plane.answer(name, BROKEN if name == "failed" else answer_of(100))
        await settle()
        trace.sent()
    assert len(ended) == 4
    assert plane.tenants.ledger.events
    assert held(plane.tenants.ledger.events, Trace | Model) == []
