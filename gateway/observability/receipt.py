"""Receipts: the time of one request, in parts that add up to the whole.

A part is the difference of two consecutive stamps of one clock (`time.perf_counter_ns`).
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import orjson

from gateway.errors import Code, InferenceError
from gateway.json_lines import cut
from gateway.messages import EngineStamps, InferRequest, InferResponse
from gateway.observability.receipt_parts import (
    MS,
    NO_HOLD,
    NO_STALLS,
    US,
    Batch,
    Part,
    less_stalls,
    short_header,
)
from gateway.observability.request_record import Record
from gateway.observability.statistics import within
from gateway.policy.caller import tenant_of

TIMING = "timing"
"""The parameter of a request by which its client asks for the receipt, and that of a response."""
HEADER = "x-want-timing"
"""The header, and the metadata, with which a client asks; its value is WISHED."""
WISHED = "1"
SERVER_TIMING = "server-timing"
"""The header of HTTP (W3C Server Timing), and the trailing metadata of gRPC."""

STALL_NS = 1_000_000
"""The shortest wait for a client that counts; less is the time of writing."""
MOST_MEMBERS = 64
"""Calls of members of an ensemble that a receipt lists."""


class Receipt:
    """The stamps of one request, from the first byte of its head to the last byte of its answer.

    The record of the request has the stamps of its model. The frontend calls `stalled` after each
    wait for the client, and `sent` once, at the end; `keep` gets the receipt of a request with an
    id then. It is `asked` for by the client, or made of every request; `told` if an answer has it.
    Most requests set few of the attributes: the values of the others are those of the class.
    """

    told = False
    sent_ns = refused_ns = texts_ns = 0
    request_id = model = version = tenant = ""
    record: Record | None = None
    noted: Batch | None = None
    refusal: tuple[Code, str] | None = None
    members: Sequence["Receipt"] = ()
    _stalls: tuple[int, int] = NO_STALLS
    _is_plain = False

    def __init__(
        self,
        begun_ns: int,
        whole_ns: int,
        asked: bool = True,
        keep: Callable[["Receipt"], None] | None = None,
    ) -> None:
        self.begun_ns = begun_ns
        self.whole_ns = whole_ns
        self.asked = asked
        self._keep = keep

    # As the account of its request.

    def accepted(self, request: InferRequest, version: str, record: Record) -> None:
        """See `Account`."""
        self.record = record
        self._is_plain = True
        if request.id:
            self.request_id, self.model, self.version = request.id, request.model, version
            self.tenant = tenant_of(request.caller)

    def refused(self, request: InferRequest, error: InferenceError) -> None:
        """Note that the request was refused before it had a record."""
        self.request_id, self.model, self.version = request.id, request.model, request.version
        self.tenant = tenant_of(request.caller)
        self.refused_ns = time.perf_counter_ns()
        self.refusal = error.code, cut(error.message)

    def becomes(self, part: "Receipt", first: "Receipt") -> None:
        """Take the outcome and the stamps of one of several requests, behind the first one."""
        self._is_plain = False
        if part is not first and first.record is not None:
            self.texts_ns = first.record.submitted_ns
        self.request_id, self.model, self.version = part.request_id, part.model, part.version
        self.tenant, self.record, self.noted = part.tenant, part.record, part.noted
        self.refusal, self.refused_ns = part.refusal, part.refused_ns
        self.members = part.members

    def executes(self, batch: Batch | None) -> None:
        """Note the batch in which an instance executes the request; None if it is queued again."""
        self.noted = batch

    # Members of ensembles.

    def member(self, request: InferRequest) -> "Receipt | None":
        """The receipt of a member's request; None beyond MOST_MEMBERS."""
        if len(self.members) == MOST_MEMBERS:
            return None
        now = time.perf_counter_ns()
        member = Receipt(now, now, asked=False)
        member.model = request.model
        self._is_plain, self.members = False, [*self.members, member]
        return member

    # For frontends.

    def stalled(self, since_ns: int) -> None:
        """Note that the answer has waited for the client since that time, until now."""
        now, record = time.perf_counter_ns(), self.record
        if now - since_ns < STALL_NS:
            return
        during, after = self._stalls
        ended_ns = now if record is None else record.ended_ns or now
        self._is_plain = False
        self._stalls = (
            during + max(0, min(now, ended_ns) - since_ns),
            after + now - max(since_ns, min(now, ended_ns)),
        )

    def sent(self) -> None:
        """Note that the answer is sent, or its client has disconnected; idempotent."""
        if self.sent_ns:
            return
        self.sent_ns = time.perf_counter_ns()
        self._is_plain = False
        if self._keep is not None:
            self._keep(self)

    # Readings.

    @property
    def failure(self) -> tuple[Code, str] | None:
        """The code and the text of the error of the request, if it has failed."""
        if self.refusal is not None:
            return self.refusal
        return None if self.record is None else self.record.failure

    @property
    def batch(self) -> Batch | None:
        """The execution of the request; None without one."""
        record = self.record
        if self.noted is not None or record is None or record.is_hit or not record.started_ns:
            return self.noted
        return Batch(record.batch_size, {self.tenant: 1}, NO_HOLD)

    @property
    def remote(self) -> bool:
        """Whether the stamps of the engine are of another machine: only their distances count."""
        record = self.record
        return record is not None and record.engine is not None and _is_remote(record)

    def parts(self) -> list[Part]:
        """The parts up to now, or up to the end; their sum is the whole time."""
        end_ns = self.sent_ns or time.perf_counter_ns()
        parts = _differences(self.begun_ns, end_ns, self._bounds(end_ns))
        return less_stalls(parts, *self._stalls)

    def _bounds(self, end_ns: int) -> list[Part]:
        """The ends of the parts."""
        found, record = [("recv", self.whole_ns)], self.record
        if record is not None:
            found.append(("decode", self.texts_ns or record.submitted_ns))
            if self.texts_ns:
                found.append(("texts", record.submitted_ns))
            found += self._execution(record, record.ended_ns or end_ns)
        elif self.refusal is not None:
            found.append(("decode", self.refused_ns))
        else:
            found.append(("replay", end_ns))
        found.append(("encode", end_ns))
        return found

    def _execution(self, record: Record, ended_ns: int) -> list[Part]:
        found = [("queue", record.released_ns)] if record.released_ns else []
        started_ns = record.started_ns
        if record.is_hit:
            found.append(("cache", ended_ns))
        elif not started_ns:
            found.append(("batch", ended_ns))
        else:
            found.append(("batch", started_ns))
            if self.members:
                members_ns = sum([each.whole_time_ns for each in self.chain])
                found += ("members", started_ns + members_ns), ("steps", ended_ns)
            else:
                found += _executed(record, started_ns, ended_ns)
        return found

    @property
    def whole_time_ns(self) -> int:
        """The time of a member, from its submission to its last response."""
        record = self.record
        return 0 if record is None else max(0, record.ended_ns - record.submitted_ns)

    @property
    def chain(self) -> Sequence["Receipt"]:
        """The members without which an ensemble would have ended sooner, in their order.

        The last one ended last; before each stands the last one that ended before its start.
        """
        ended = [each for each in self.members if each.record and each.record.ended_ns]
        ended.sort(key=ended_ns, reverse=True)
        found: list[Receipt] = []
        before_ns = time.perf_counter_ns()
        for each in ended:
            if ended_ns(each) <= before_ns:
                found.append(each)
                before_ns = each.begun_ns
        found.reverse()
        return found

    def calls(self) -> list[dict[str, Any]]:
        """The parts of each call of a member of an ensemble, in milliseconds."""
        chain = set(self.chain)
        return [
            {
                "model": each.model,
                "start": _ms(each.begun_ns - self.begun_ns),
                "longest": each in chain,
                **in_ms(each.parts_of_execution()),
            }
            for each in self.members
        ]

    def parts_of_execution(self) -> list[Part]:
        """The parts of a member, from its submission to its last response."""
        record = self.record
        if record is None:
            return []
        ended_ns = record.ended_ns or time.perf_counter_ns()
        bounds = self._execution(record, ended_ns)
        return _differences(record.submitted_ns, ended_ns, bounds)

    def described(self) -> dict[str, Any]:
        """The members of the JSON form: the parts and `total`, in milliseconds."""
        found: dict[str, Any] = dict(self._in_ms())
        record = self.record
        if record is not None and record.engine is not None and record.engine.preemptions:
            found["preemptions"] = record.engine.preemptions
        if self.remote:
            found["remote"] = True
        if self.members:
            found["calls"] = self.calls()
        return found

    def json(self) -> bytes:
        """The JSON form."""
        return orjson.dumps(self.described())

    def header(self) -> str:
        """The form of the header `Server-Timing`."""
        record = self.record
        if record is not None and self._is_plain and record.phases is not None:
            text = short_header(self.begun_ns - US // 2, self.whole_ns, record, record.phases)
            if text:
                return text
        return ", ".join([f"{name};dur={ms}" for name, ms in self._in_ms().items()])

    def _in_ms(self) -> dict[str, float]:
        """The `parts` as `in_ms`; without waits for the client in one step."""
        if self._stalls != NO_STALLS:
            return in_ms(self.parts())
        end_ns = self.sent_ns or time.perf_counter_ns()
        return _rounded(self.begun_ns, end_ns, self._bounds(end_ns))


def with_timing(response: InferResponse, receipt: Receipt | None) -> InferResponse:
    """The last response of a request with its receipt up to now, as a parameter."""
    if receipt is None or response.error is not None:
        return response
    parameters = {**response.parameters, TIMING: receipt.json().decode()}
    return replace(response, parameters=parameters)


def receipt_of(request: InferRequest) -> Receipt | None:
    """The receipt of a request, if it has one."""
    receipt = request.receipt
    return receipt if isinstance(receipt, Receipt) else None


def in_ms(parts: Sequence[Part]) -> dict[str, float]:
    """The parts in milliseconds, rounded so that they add up to `total`."""
    bounds: list[Part] = []
    total_ns = 0
    for name, duration_ns in parts:
        total_ns += duration_ns
        bounds.append((name, total_ns))
    return _rounded(0, total_ns, bounds)


def _rounded(begin_ns: int, end_ns: int, bounds: Iterable[Part]) -> dict[str, float]:
    """As `in_ms` of the `_differences`, in one step."""
    found: dict[str, float] = {}
    last_ns, told_us = begin_ns, 0
    for name, bound_ns in bounds:
        if bound_ns > last_ns:
            last_ns = bound_ns if bound_ns < end_ns else end_ns
            end_us = (last_ns - begin_ns + US // 2) // US
            found[name] = (end_us - told_us) / MS
            told_us = end_us
        else:
            found[name] = 0.0
    found["total"] = told_us / MS
    return found


def _ms(ns: int) -> float:
    return round(ns / US) / MS


def ended_ns(receipt: Receipt) -> int:
    """The time at which the answer of the model was complete; 0 before."""
    return 0 if receipt.record is None else receipt.record.ended_ns


def _differences(begin_ns: int, end_ns: int, bounds: Iterable[Part]) -> list[Part]:
    """The durations between consecutive ends; each end is at least the one before it."""
    found: list[Part] = []
    for name, bound_ns in bounds:
        if bound_ns <= begin_ns:
            found.append((name, 0))
        else:
            until_ns = bound_ns if bound_ns < end_ns else end_ns
            found.append((name, until_ns - begin_ns))
            begin_ns = until_ns
    return found


def _executed(record: Record, started_ns: int, ended_ns: int) -> list[Part]:
    """The ends of the parts of an execution."""
    if record.engine is not None:
        return _engine_bounds(record, record.engine, ended_ns)
    if record.has_tokens:
        return [("engine", ended_ns)]
    phases = within(record.phases, ended_ns - started_ns)
    return [
        ("input", started_ns + phases.input_ns),
        ("infer", ended_ns - phases.output_ns),
        ("output", ended_ns),
    ]


def _engine_bounds(record: Record, stamps: EngineStamps, ended_ns: int) -> list[Part]:
    named = (
        ("tokenize", stamps.queued_ns),
        ("engine_queue", stamps.scheduled_ns),
        ("prefill", stamps.first_token_ns),
        ("generate", stamps.last_token_ns),
    )
    found = [each for each in named if each[1]]
    if found and _is_remote(record):
        # The last stamp is taken as that of the last response: only distances are known.
        shift = ended_ns - found[-1][1]
        found = [(name, ns + shift) for name, ns in found]
    found.append(("detokenize" if found else "engine", ended_ns))
    return found


def _is_remote(record: Record) -> bool:
    """Whether a stamp of the engine lies outside of the execution: it has another clock."""
    stamps = record.engine
    if stamps is None:
        return False
    started_ns, ended_ns = record.started_ns, record.ended_ns or time.perf_counter_ns()
    first_ns = stamps.queued_ns or started_ns
    last_ns = stamps.last_token_ns or stamps.scheduled_ns or ended_ns
    return not (started_ns <= first_ns <= ended_ns and started_ns <= last_ns <= ended_ns)
