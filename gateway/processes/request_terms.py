"""Encoding of the terms of requests between processes: all but their inputs and parameters."""

import time
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Self

import msgspec
from msgspec import Meta

from gateway.admission.deadlines import DAY_NS
from gateway.errors import InferenceError
from gateway.messages import (
    MOST_OUTPUTS,
    Deadline,
    InferRequest,
    Lineage,
    RequestedOutput,
    RoutedPrompt,
    SequenceTag,
    too_many_outputs,
)
from gateway.tensor import value

NS_PER_US = 1000
DAY_US = DAY_NS // NS_PER_US

Size = Annotated[int, Meta(ge=0)]
_Time = Annotated[int, Meta(ge=0, le=DAY_US)]
_TraceParent = Annotated[str, Meta(pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")]
_Key = Annotated[bytes, Meta(min_length=8, max_length=8)]
_Keys = Annotated[tuple[_Key, ...], Meta(max_length=2048)]


class Array(msgspec.Struct, array_like=True, gc=False):
    """An array of fields; without cycles it needs no garbage collector."""


class _Output(Array):
    name: str
    classes: Size = 0


class _Sequence(Array):
    correlation_id: int | str
    start: bool
    end: bool


class _Deadline(Array):
    """The times that are left of a `Deadline`, and its wishes; 0 is none."""

    first_us: _Time = 0
    whole_us: _Time = 0
    held_first_us: _Time = 0
    held_whole_us: _Time = 0
    slo_first_us: _Time = 0
    slo_token_us: _Time = 0
    asked: bool = False


class Terms(Array):
    """The terms of a request as a part of its message."""

    outputs: tuple[_Output, ...] = ()
    sequence: _Sequence | None = None
    priority: Size = 0
    timeout_us: Size = 0
    traceparent: _TraceParent | None = None
    prompt: tuple[Size, _Keys] | None = None
    chosen: bool = False
    sticky: dict[str, str] | None = None
    timed: bool = False
    deadline: _Deadline | None = None


@value
class TraceParent:
    """A `traceparent` (W3C Trace Context, 3.2): the parent of the traces of a request."""

    text: str

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of a request that continues the trace."""
        return {"traceparent": self.text}

    def child(self) -> Self:
        """The parent of a request that a model makes for this one."""
        return self


class SentTimes:
    """The receipt of a request of another process, which gets the times in responses."""

    def accepted(self, request: InferRequest, version: str, record: Any) -> None:
        """See `Account`; nothing is noted here."""

    def refused(self, request: InferRequest, error: InferenceError) -> None:
        """See `Account`."""

    def executes(self, batch: Any) -> None:
        """See `Account`."""

    def member(self, request: InferRequest) -> None:
        """See `Account`."""


class Routing(NamedTuple):
    """The fields of a request that its router sets: `InferRequest` has them, too.

    They are written without a copy of the request, which takes twice as long as its message.
    """

    version: str
    trace: Lineage | None
    prompt: RoutedPrompt | None
    chosen: bool


def written_terms(request: InferRequest, waited_us: int, routing: Routing) -> Terms | None:
    """The terms of a request, if it has any.

    Its timeout is sent as the time left after `waited_us`, and its deadline as the time left now.
    """
    outputs, tag, timeout_us = request.outputs, request.sequence, request.timeout_us
    _, trace, prompt, chosen = routing
    deadline = request.deadline
    has_terms = outputs or tag or request.priority or timeout_us or trace or prompt or deadline
    if not (has_terms or chosen or request.receipt):
        return None
    return Terms(
        tuple([_Output(each.name, each.classes) for each in outputs]),
        None if tag is None else _Sequence(tag.correlation_id, tag.start, tag.end),
        request.priority,
        max(timeout_us - waited_us, 1) if timeout_us else 0,
        None if trace is None else trace.headers.get("traceparent"),
        None if prompt is None else (prompt.size_bytes, prompt.keys),
        chosen,
        dict(request.sticky) if request.sticky else None,
        request.receipt is not None,
        None if deadline is None else _written(deadline, time.perf_counter_ns()),
    )


def read_terms(terms: Terms, tenant: str, received_ns: int) -> dict[str, Any]:
    """The fields of a request with terms; the time left of its deadline is from its receipt on."""
    outputs, tag, parent = terms.outputs, terms.sequence, terms.traceparent
    if len(outputs) > MOST_OUTPUTS:
        raise too_many_outputs(len(outputs))
    return {
        "outputs": tuple([RequestedOutput(each.name, each.classes) for each in outputs]),
        "sequence": tag and SequenceTag(tag.correlation_id, tag.start, tag.end, tenant),
        "priority": terms.priority,
        "timeout_us": terms.timeout_us,
        "trace": parent and TraceParent(parent),
        "prompt": terms.prompt and RoutedPrompt(*terms.prompt),
        "chosen": terms.chosen,
        "sticky": terms.sticky,
        "receipt": SentTimes() if terms.timed else None,
        "deadline": terms.deadline and _read(terms.deadline, received_ns or time.perf_counter_ns()),
    }


def _written(deadline: Deadline, now_ns: int) -> _Deadline:
    return _Deadline(
        _left_us(deadline.first_ns, now_ns),
        _left_us(deadline.whole_ns, now_ns),
        _left_us(deadline.held_first_ns, now_ns),
        _left_us(deadline.held_whole_ns, now_ns),
        _left_us(deadline.slo_first_ns, 0),
        _left_us(deadline.slo_token_ns, 0),
        deadline.asked,
    )


def _left_us(at_ns: int, now_ns: int) -> int:
    """The time until a moment, from 1 µs to a day; 0 for none."""
    return min(max(1, (at_ns - now_ns) // NS_PER_US), DAY_US) if at_ns else 0


def _read(found: _Deadline, received_ns: int) -> Deadline:
    return Deadline(
        first_ns=_after(received_ns, found.first_us),
        whole_ns=_after(received_ns, found.whole_us),
        held_first_ns=_after(received_ns, found.held_first_us),
        held_whole_ns=_after(received_ns, found.held_whole_us),
        slo_first_ns=found.slo_first_us * NS_PER_US,
        slo_token_ns=found.slo_token_us * NS_PER_US,
        asked=found.asked,
    )


def _after(received_ns: int, left_us: int) -> int:
    return received_ns + left_us * NS_PER_US if left_us else 0
