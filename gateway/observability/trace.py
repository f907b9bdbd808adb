"""Traces of single requests, and the files for them (trace extension)."""

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gateway.errors import InferenceError
from gateway.messages import NO_PARAMETERS, InferRequest, InferResponse, Phases
from gateway.observability.gen_ai import Generated
from gateway.observability.traceparent import (
    TRACE_ID_BITS,
    NumberedIds,
    ParentSpan,
    SpanIds,
    new_id,
)
from gateway.tensor import Datatype, Tensor, bf16_floats

TIMESTAMPS = "TIMESTAMPS"
TENSORS = "TENSORS"
LEVELS = (TIMESTAMPS, TENSORS)

NO_NUMBERS: Iterator[int] = iter(())
"""The ids for children of a trace without children."""
NO_PHASES = Phases()
ANSWERED = "INFER_RESPONSE_COMPLETE"
"""The name of the stamp of the first response."""
END, SENT, CHILD = 1, 2, 4
"""Missing parts of a trace: two flags, and in the bits above them a count of children."""


@dataclass(frozen=True, slots=True, eq=False)
class WireStamps:
    """The names of the stamps of a wire, for the arrival of a request and for its answer."""

    received: tuple[str, str]
    sent: tuple[str, str]


class Trace(ABC):
    """The events of one request.

    `keep` gets the complete trace: the request and its children have ended, and the frontend has
    called `sent`. A `refused` trace goes to `keep` at once. `numbers` gives the ids of children.
    Times are `time.perf_counter_ns`. `asked` are attributes of a request to a language model,
    `generated` is the answer of one, `ids` gives the ids of a trace that becomes spans. Unless it
    `reads_responses`, it needs the time of the first one, `answered_ns`, and those with tokens.
    """

    __slots__ = (
        "_keep",
        "_missing",
        "_numbers",
        "_parent",
        "answered_ns",
        "asked",
        "generated",
        "id",
    )

    reads_responses = True
    ids: SpanIds | NumberedIds | None = None

    def __init__(
        self,
        number: int,
        keep: Callable[[Self], None],
        numbers: Iterator[int] = NO_NUMBERS,
        parent: Self | None = None,
    ) -> None:
        self.id = number
        self._keep: Callable[[Any], None] = keep
        self._numbers = numbers
        self._parent = parent
        self._missing = END if parent is not None else END | SENT
        self.asked: Mapping[str, Any] = NO_PARAMETERS
        self.generated: Generated | None = None
        self.answered_ns = 0

    @property
    def spans(self) -> SpanIds | None:
        """The ids of its spans; None if it has none."""
        return None if self.ids is None else self.ids.of(self.id)

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of requests for this one in other programs; empty if they have none."""
        return NO_PARAMETERS

    def child(self) -> Self:
        """The trace of a member request, a part of this trace."""
        self._missing += CHILD
        return self._child(next(self._numbers))

    @abstractmethod
    def _child(self, number: int) -> Self:
        """The trace with that number, which `_adopt` keeps."""

    def _adopt(self, child: Self) -> None:
        """Take a complete child."""
        self._missing -= CHILD
        if not self._missing:
            self._keep(self)

    @abstractmethod
    def stamp(self, activity: str, ns: int | None = None) -> None:
        """Add a timestamp: now, or the given time."""

    def received(self, wire: WireStamps, begun_ns: int, whole_ns: int) -> None:
        """Stamp the arrival of the request: its first byte, and its last."""
        self.stamp(wire.received[0], begun_ns)
        self.stamp(wire.received[1], whole_ns)

    @abstractmethod
    def accepted(self, model: str, version: str, request: InferRequest) -> None:
        """Record the request and its inputs, before it is queued."""

    @abstractmethod
    def routed(self, replica: str) -> str:
        """Record that the request is sent to a replica; returns its `traceparent` there."""

    @abstractmethod
    def responded(self, response: InferResponse, ns: int, *, first: bool) -> None:
        """Record the outputs of a response."""

    def answered(self, ns: int) -> None:
        """Stamp the first response or error; a child has no client, so it gets no stamp."""
        if self._parent is None:
            self.stamp(ANSWERED, ns)

    @abstractmethod
    def computed(self, started_ns: int, phases: Phases) -> None:
        """Stamp the phases of an execution with that start."""

    def ended(
        self,
        ns: int,
        error: InferenceError | None = None,
        started_ns: int = 0,
        phases: Phases = NO_PHASES,
    ) -> None:
        """Stamp the end of the request, successful or not, and its execution if it has a start."""
        if started_ns:
            self.computed(started_ns, phases)
        self._end(ns, error)
        self._complete(END)

    @abstractmethod
    def _end(self, ns: int, error: InferenceError | None) -> None:
        """Stamp the end of the request."""

    def refused(self, error: InferenceError | None = None) -> None:
        """End the trace: the request was refused before it was queued."""
        self._refuse(error)
        self._missing = 0
        self._keep(self)

    @abstractmethod
    def _refuse(self, error: InferenceError | None) -> None:
        """Record the refusal, after which nothing is recorded."""

    def answer_sent(self, wire: WireStamps, begun_ns: int) -> None:
        """Stamp the write of the whole response, from then until now, and record it as `sent`."""
        self.stamp(wire.sent[0], begun_ns)
        self.stamp(wire.sent[1])
        self.sent()

    def sent(self) -> None:
        """Record that the frontend has sent the response; idempotent."""
        self._complete(SENT)

    def _complete(self, part: int) -> None:
        if self._missing & part:
            self._missing ^= part
            if not self._missing:
                self._keep(self)


class FileTrace(Trace):
    """The JSON objects of one trace, in the order of their events.

    `traceparent` is that of the router that has sent the request, "" without one.
    """

    __slots__ = ("_tensors", "_timestamps", "objects", "traceparent")

    def __init__(
        self,
        number: int,
        levels: Iterable[str],
        keep: Callable[["FileTrace"], None],
        numbers: Iterator[int] = NO_NUMBERS,
        parent: "FileTrace | None" = None,
    ) -> None:
        super().__init__(number, keep, numbers, parent)
        self.objects: list[dict[str, Any]] = []
        self.traceparent = ""
        self._timestamps = TIMESTAMPS in levels
        self._tensors = TENSORS in levels

    def _child(self, number: int) -> "FileTrace":
        on = ((TIMESTAMPS, self._timestamps), (TENSORS, self._tensors))
        levels = [level for level, wanted in on if wanted]
        return FileTrace(number, levels, self._adopt, self._numbers, self)

    def _adopt(self, child: "FileTrace") -> None:
        """Put the objects of a child in front, as Triton does."""
        self.objects = child.objects + self.objects
        super()._adopt(child)

    def stamp(self, activity: str, ns: int | None = None) -> None:
        if self._timestamps:
            moment = time.perf_counter_ns() if ns is None else ns
            stamp = {"name": activity, "ns": moment}
            self.objects.append({"id": self.id, "timestamps": [stamp]})

    def accepted(self, model: str, version: str, request: InferRequest) -> None:
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
        traceparent = ParentSpan(new_id(TRACE_ID_BITS), self.id).text
        sent = {"replica": replica, "traceparent": traceparent, "ns": time.perf_counter_ns()}
        self.objects.append({"id": self.id, **sent})
        return traceparent

    def responded(self, response: InferResponse, ns: int, *, first: bool) -> None:
        self._show("TENSOR_BACKEND_OUTPUT", response.outputs)
        if first:
            self.answered(ns)

    def computed(self, started_ns: int, phases: Phases) -> None:
        input_end_ns = started_ns + phases.input_ns
        output_start_ns = input_end_ns + phases.infer_ns
        self.stamp("COMPUTE_START", started_ns)
        self.stamp("COMPUTE_INPUT_END", input_end_ns)
        self.stamp("COMPUTE_OUTPUT_START", output_start_ns)
        self.stamp("COMPUTE_END", output_start_ns + phases.output_ns)

    def _end(self, ns: int, error: InferenceError | None) -> None:
        self.stamp("REQUEST_END", ns)

    def _refuse(self, error: InferenceError | None) -> None:
        """Empty the trace: it is counted only."""
        self.objects.clear()
        self._timestamps = False

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
