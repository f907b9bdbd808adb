"""The receipts of a server: the requests that have one, and the latest of each tenant."""

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.errors import Code
from gateway.json_lines import MOST_CHARS, cut
from gateway.messages import InferRequest
from gateway.observability.receipt import TIMING, Receipt, in_ms
from gateway.observability.receipt_parts import SHOWN_TENANTS, Batch, Bound
from gateway.observability.request_context import current_request

MOST_OF_TENANT = 1000
MOST_KEPT = 10_000
"""Kept receipts: of one tenant, and of all; the oldest ones are dropped."""

WAITS: Mapping[str, str] = {
    "recv": "for the rest of its body: the client, or the network, was slow",
    "decode": "for the decoding of its body",
    "texts": "for the texts before it: at most 256 of a request are in flight",
    "queue": "for its turn among tenants: the limit is the share of its tenant",
    "batch": "for an instance: the limit is the number of instances, the delay of a batch, or the "
    "slots of sequences",
    "cache": "for the response cache",
    "replay": "for the request that first had its idempotency key",
    "tokenize": "for the making of its tokens, before the engine had it",
    "engine_queue": "in the queue of the engine: the limit is its sequences, its KV cache, or the "
    "tokens of a step",
    "prefill": "for the prefill of its prompt",
    "generate": "for the tokens of its answer",
    "detokenize": "for the text of its last tokens",
    "engine": "for the engine",
    "input": "for the gathering of its inputs",
    "infer": "for the execution of the model",
    "output": "for the outputs of the model",
    "members": "for the models of the ensemble",
    "steps": "between the models of the ensemble",
    "encode": "for the encoding and writing of its answer",
    "stall": "for the client, which read slowly",
}
"""The cause of the wait in each part."""
BATCH_WAITS: Mapping[Bound, str] = {
    Bound.INSTANCES: "for an instance: the limit is the number of instances",
    Bound.DELAY: "for further requests of its batch: the limit is the delay of a batch",
    Bound.TURN: "for the turn of an instance: the limit is the resources of the rate limiter",
    Bound.UNKNOWN: WAITS["batch"],
}
"""The same of the part `batch`, where the limit is known."""


class Receipts:
    """Makes receipts, and keeps the latest ones by tenant and id.

    `every` request has one, or those whose client asks.
    """

    def __init__(self, *, every: bool = False) -> None:
        self.every = every
        self._kept: OrderedDict[str, OrderedDict[str, Receipt]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def begin(
        self, request: InferRequest, begun_ns: int, whole_ns: int, *, wished: bool
    ) -> InferRequest:
        """The request for the model, with a receipt if it is `wished`, or every one has it.

        The parameter `timing` is a wish, and not for the model, if it is true.
        """
        if request.parameters and request.parameters.get(TIMING) is True:
            left = {name: each for name, each in request.parameters.items() if name != TIMING}
            request, wished = replace(request, parameters=left), True
        if wished or self.every:
            keep = self._keep if request.id else None
            receipt = Receipt(begun_ns, whole_ns, wished, keep)
            request.receipt = receipt  # type: ignore[misc]  # frozen for the type checker only
            logged = current_request()
            if logged is not None:
                logged.receipt = receipt
        return request

    def why(self, tenant: str, request_id: str) -> dict[str, Any] | None:
        """The account of an ended request; None for an unknown one, or that of another tenant."""
        kept = self._kept.get(tenant)
        receipt = None if kept is None else kept.get(request_id)
        return None if receipt is None else account(receipt)

    def _keep(self, receipt: Receipt) -> None:
        request_id, tenant = receipt.request_id, receipt.tenant
        if not 0 < len(request_id) <= MOST_CHARS:
            return
        record = receipt.record
        if record is not None and record.failure is not None:
            record.failure = record.failure[0], cut(record.failure[1])
        kept = self._kept.get(tenant)
        if kept is None:
            kept = self._kept[tenant] = OrderedDict()
        self._kept.move_to_end(tenant)
        if kept.pop(request_id, None) is None:
            self._count += 1
        kept[request_id] = receipt
        if len(kept) > MOST_OF_TENANT:
            kept.popitem(last=False)
            self._count -= 1
        elif self._count > MOST_KEPT:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop the oldest receipt of the tenant whose last request ended first."""
        tenant, kept = next(iter(self._kept.items()))
        kept.popitem(last=False)
        self._count -= 1
        if not kept:
            del self._kept[tenant]


def account(receipt: Receipt) -> dict[str, Any]:
    """The account of a request, in words and in numbers."""
    parts = receipt.parts()
    longest, _ = max(parts, key=lambda part: part[1])
    found: dict[str, Any] = {
        "id": receipt.request_id,
        "model": receipt.model,
        "version": receipt.version,
        "status": _status(receipt),
        "ended_secs_ago": round((time.perf_counter_ns() - receipt.sent_ns) / 1e9, 3),
        "why": _sentences(receipt, longest, in_ms(parts)),
        "timing": receipt.described(),
    }
    if (batch := receipt.batch) is not None:
        found["batch"] = _batch(batch, receipt.tenant)
    return found


def _status(receipt: Receipt) -> str:
    failure = receipt.failure
    if failure is None:
        return "ok"
    code, message = failure
    if receipt.refusal is not None:
        return f"refused: {message}"
    return "cancelled" if code is Code.CANCELLED else f"failed: {message}"


def _sentences(receipt: Receipt, longest: str, ms: Mapping[str, float]) -> list[str]:
    found = [f"{ms[longest]} of its {ms['total']} ms it waited {_wait(receipt, longest)}."]
    engine = None if receipt.record is None else receipt.record.engine
    if engine is not None and engine.preemptions:
        found.append(f"The engine put it back {engine.preemptions} times: its KV cache was full.")
    if receipt.refusal is not None:
        found.append("It was refused before it was queued.")
    batch = receipt.batch
    if batch is not None and (others := batch.requests - 1):
        of_others = others + 1 - batch.tenants[receipt.tenant]
        subject = f"Its batch of {batch.rows} rows had"
        if batch.shared:
            subject = "When it began, its instance executed"
        found.append(f"{subject} {others} further requests, {of_others} of them of other tenants.")
    return found


def _wait(receipt: Receipt, part: str) -> str:
    """The cause of the wait in a part, with the limit that bound it where it is known."""
    record, batch = receipt.record, receipt.batch
    engine = None if record is None else record.engine
    if part == "engine_queue" and engine is not None and engine.limit:
        return f"in the queue of the engine: the limit is {engine.limit}"
    if part != "batch" or record is None or batch is None or not record.started_ns:
        return WAITS[part]
    queued_ns = record.released_ns or record.submitted_ns
    return BATCH_WAITS[batch.hold.over(queued_ns, record.started_ns)]


def _batch(batch: Batch, tenant: str) -> dict[str, Any]:
    others = batch.tenants.keys() - {tenant}
    return {
        "rows": batch.rows,
        "requests": batch.requests,
        "of_other_tenants": batch.requests - batch.tenants[tenant],
        "other_tenants": sorted(others)[:SHOWN_TENANTS],
    }
