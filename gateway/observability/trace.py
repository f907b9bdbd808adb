"""Traces of single requests, and the files for them (trace extension)."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gateway.errors import InferenceError
from gateway.messages import NO_PARAMETERS, InferRequest, InferResponse, Phases, Usage
from gateway.observability.gen_ai import Generated
from gateway.observability.traceparent import (
    SPAN_ID_BITS,
    TRACE_ID_BITS,
    ParentSpan,
    SpanIds,
    new_id,
)
from gateway.tensor import Datatype, Tensor, bf16_floats

TIMESTAMPS = "TIMESTAMPS"
TENSORS = "TENSORS"
LEVELS = (TIMESTAMPS, TENSORS)

Stamp = tuple[str, int]
"""The name of an event, and its time."""
NO_NUMBERS: Iterator[int] = iter(())
"""The ids for children of a trace without children."""


class Trace:
    """The JSON objects of one trace, in the order of their events.

    `keep` gets the complete trace: the request and its children have ended, and the frontend has
    called `sent`. A `refused` trace goes to `keep` at once. `numbers` gives the ids of children.
    Times are `time.perf_counter_ns`. `traceparent` is that of the router that has sent the request,
    "" without one.

    With `spans` it becomes spans of OpenTelemetry: then each child keeps its own objects, times are
    in `stamps` instead, and `descendants` are those of the outermost one. `span_id` is that of the
    span of its model, `error` that of the request, `asked` are attributes of a request to a
    language model, and `generated` is the answer of one.
    """

    __slots__ = (
        "_keep",
        "_missing",
        "_numbers",
        "_parent",
        "_tensors",
        "_timestamps",
        "asked",
        "descendants",
        "error",
        "generated",
        "id",
        "objects",
        "parent_id",
        "span_id",
        "spans",
        "stamps",
        "traceparent",
    )

    def __init__(
        self,
        number: int,
        levels: Iterable[str],
        keep: Callable[["Trace"], None],
        numbers: Iterator[int] = NO_NUMBERS,
        parent: "Trace | None" = None,
    ) -> None:
        self.id = number
        self._numbers = numbers
        self._parent = parent
        self.parent_id = 0 if parent is None else parent.id
        self.objects: list[dict[str, Any]] = []
        self.stamps: list[Stamp] = []
        self.descendants: list[Trace] = [] if parent is None else parent.descendants
        self.traceparent = ""
        self.spans: SpanIds | None = None
        self.span_id = 0
        self.error: InferenceError | None = None
        self.asked: Mapping[str, Any] = NO_PARAMETERS
        self.generated: Generated | None = None
        self._timestamps = TIMESTAMPS in levels
        self._tensors = TENSORS in levels
        self._keep = keep
        self._missing: set[str | int] = {"end"} if parent else {"end", "sent"}

    def becomes_spans(self, ids: SpanIds) -> None:
        """Make it one of OpenTelemetry; call this before any stamp."""
        self.spans = ids
        self.span_id = new_id(SPAN_ID_BITS)

    @property
    def members(self) -> "list[Trace]":
        """The trace of the whole request, and those of all its members."""
        if self._parent is not None:
            return self._parent.members
        # A list with the trace in it would be a cycle, which only the garbage collector frees.
        return [self, *self.descendants]

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of requests for this one in other programs; empty if they have none."""
        return NO_PARAMETERS if self.spans is None else self.spans.as_parent(self.span_id).headers

    def child(self) -> "Trace":
        """The trace of a member request, a part of this trace."""
        on = ((TIMESTAMPS, self._timestamps), (TENSORS, self._tensors))
        levels = [level for level, wanted in on if wanted]
        child = Trace(next(self._numbers), levels, self._adopt, self._numbers, self)
        if self.spans is not None:
            child.becomes_spans(self.spans)
            self.descendants.append(child)
        self._missing.add(child.id)
        return child

    def _adopt(self, child: "Trace") -> None:
        """Put the objects of a child in front, as Triton does."""
        if self.spans is None:
            self.objects = child.objects + self.objects
        self._complete(child.id)

    def stamp(self, activity: str, ns: int | None = None) -> None:
        """Add a timestamp: now, or the given time."""
        if not self._timestamps:
            return
        moment = time.perf_counter_ns() if ns is None else ns
        if self.spans is not None:
            self.stamps.append((activity, moment))
        else:
            stamp = {"name": activity, "ns": moment}
            self.objects.append({"id": self.id, "timestamps": [stamp]})

    def accepted(self, model: str, version: str, request: InferRequest) -> None:
        """Record the request and its inputs, before it is queued."""
        about: dict[str, Any] = {"id": self.id, "model_name": model, "model_version": int(version)}
        if request.id:
            about["request_id"] = request.id
        if self._parent is not None:
            about["parent_id"] = self._parent.id
        if self.traceparent:
            about["traceparent"] = self.traceparent
        self.objects.append(about)
        self.stamp("REQUEST_START")
        self.stamp("QUEUE_START")
        self._show("TENSOR_QUEUE_INPUT", request.inputs)

    def routed(self, replica: str) -> str:
        """Record that the request is sent to a replica; returns its `traceparent` there."""
        if self.spans is None:
            traceparent = ParentSpan(new_id(TRACE_ID_BITS), self.id).text
        else:
            traceparent = self.spans.as_parent(new_id(SPAN_ID_BITS)).text
        sent = {"replica": replica, "traceparent": traceparent, "ns": time.perf_counter_ns()}
        self.objects.append({"id": self.id, **sent})
        return traceparent

    def responded(self, response: InferResponse, ns: int, *, first: bool) -> None:
        """Record the outputs of a response."""
        self._show("TENSOR_BACKEND_OUTPUT", response.outputs)
        if first:
            self.answered(ns)
        if self.spans is not None and (response.usage is not None or response.engine is not None):
            if self.generated is None:
                self.generated = Generated()
            self.generated.add(response, ns)

    def answered(self, ns: int) -> None:
        """Stamp the first response or error; a child has no client, so it gets no stamp."""
        if self._parent is None:
            self.stamp("INFER_RESPONSE_COMPLETE", ns)

    def computed(self, started_ns: int, phases: Phases) -> None:
        """Stamp the phases of an execution with that start."""
        input_end_ns = started_ns + phases.input_ns
        output_start_ns = input_end_ns + phases.infer_ns
        self.stamp("COMPUTE_START", started_ns)
        self.stamp("COMPUTE_INPUT_END", input_end_ns)
        self.stamp("COMPUTE_OUTPUT_START", output_start_ns)
        self.stamp("COMPUTE_END", output_start_ns + phases.output_ns)

    def ended(
        self, ns: int, error: InferenceError | None = None, usage: Usage | None = None
    ) -> None:
        """Stamp the end of the request, successful or not; `usage` are its tokens."""
        self.error = error
        if self.generated is not None and usage is not None:
            self.generated.usage = usage
        self.stamp("REQUEST_END", ns)
        self._complete("end")

    def refused(self, error: InferenceError | None = None) -> None:
        """End the trace: the request was refused before it was queued.

        It is empty, unless it becomes spans: then a caller may know of it.
        """
        self.error = error
        if self.spans is None:
            self.objects.clear()
        self._timestamps = False
        self._missing.clear()
        self._keep(self)

    def sent(self) -> None:
        """Record that the frontend has sent the response; idempotent."""
        self._complete("sent")

    def _complete(self, part: str | int) -> None:
        if part in self._missing:
            self._missing.discard(part)
            if not self._missing:
                self._keep(self)

    def _show(self, activity: str, tensors: Iterable[Tensor]) -> None:
        if not self._tensors:
            return
        for tensor in tensors:
            shown = {
                "name": tensor.name,
                "data": _data(tensor),
                "shape": ",".join(map(str, tensor.shape)),
                "dtype": tensor.datatype.value,
            }
            self.objects.append({"id": self.id, "activity": activity, "tensor": shown})


def _data(tensor: Tensor) -> str:
    """All elements: numbers with six significant digits, as Triton writes them; text in quotes."""
    if tensor.datatype is Datatype.BYTES:
        texts = (element.decode(errors="replace") for element in tensor.elements())
        return ",".join(json.dumps(text, ensure_ascii=False) for text in texts)
    array = tensor.array().reshape(-1)
    if tensor.datatype is Datatype.BF16:
        array = bf16_floats(array)
    if array.dtype.kind == "f":
        return ",".join(f"{value:g}" for value in array.tolist())
    return ",".join(str(int(value)) for value in array.tolist())


log = logging.getLogger("sluice.trace")


class TraceFile:
    """One file that grows, and numbered files that are written once; each is a JSON array.

    A numbered file appears when it is complete, so a script that follows the folder never reads a
    part of it. A failed write is logged and its traces are dropped: tracing must not fail requests.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._index = 0
        self._begun = False

    def append(self, traces: Sequence[str]) -> None:
        """Add traces to the file without a number; each is JSON objects joined by commas."""
        if traces:
            self._write("," if self._begun else "[", ",".join(traces))
            self._begun = True

    def write_numbered(self, traces: Iterable[str]) -> None:
        """Write traces to the file with the next number."""
        path = Path(f"{self._path}.{self._index}")
        part = path.with_name(f".{path.name}.part")
        self._index += 1
        try:
            part.write_text(f"[{','.join(traces)}]", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            self._log_failure(error)

    def close(self) -> None:
        """End the array of the file without a number."""
        if self._begun:
            self._write("]")

    def _write(self, *texts: str) -> None:
        """Append; the first write of this process replaces the file."""
        try:
            with Path(self._path).open("a" if self._begun else "w", encoding="utf-8") as file:
                file.writelines(texts)
        except OSError as error:
            self._log_failure(error)

    def _log_failure(self, error: OSError) -> None:
        log.error("traces not written", extra={"file": self._path, "reason": error.strerror})
