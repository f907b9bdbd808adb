"""What happened to one sampled request, and when (trace extension, file output)."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gateway.messages import InferRequest, InferResponse, Phases
from gateway.tensor import Datatype, Tensor

TIMESTAMPS = "TIMESTAMPS"
TENSORS = "TENSORS"
LEVELS = (TIMESTAMPS, TENSORS)

BF16_SHIFT = 16
NO_NUMBERS: Iterator[int] = iter(())
"""Those of a trace that is to have no children."""


class Trace:
    """The objects of one trace, in the order in which they were told.

    It is whole, and handed to `keep`, once the request and those made on its behalf have ended in
    the core and the frontend has said `sent`; one that was `refused` is empty, and handed over at
    once. `numbers` are those of its children. Times are `time.perf_counter_ns`.
    """

    __slots__ = (
        "_keep",
        "_missing",
        "_numbers",
        "_parent",
        "_tensors",
        "_timestamps",
        "id",
        "objects",
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
        self.objects: list[dict[str, Any]] = []
        self._timestamps = TIMESTAMPS in levels
        self._tensors = TENSORS in levels
        self._keep = keep
        self._missing: set[str | int] = {"end"} if parent else {"end", "sent"}

    def child(self) -> "Trace":
        """The trace of a request that is made on behalf of this one; part of what is kept."""
        on = ((TIMESTAMPS, self._timestamps), (TENSORS, self._tensors))
        levels = [level for level, wanted in on if wanted]
        child = Trace(next(self._numbers), levels, self._adopt, self._numbers, self)
        self._missing.add(child.id)
        return child

    def _adopt(self, child: "Trace") -> None:
        """As on Triton, what happened on behalf of a request comes first."""
        self.objects = child.objects + self.objects
        self._complete(child.id)

    def stamp(self, activity: str, ns: int | None = None) -> None:
        """Something happened: now, or when it says."""
        if self._timestamps:
            moment = time.perf_counter_ns() if ns is None else ns
            stamp = {"name": activity, "ns": moment}
            self.objects.append({"id": self.id, "timestamps": [stamp]})

    def accepted(self, model: str, version: str, request: InferRequest) -> None:
        """The request is about to be queued."""
        about: dict[str, Any] = {"id": self.id, "model_name": model, "model_version": int(version)}
        if request.id:
            about["request_id"] = request.id
        if self._parent is not None:
            about["parent_id"] = self._parent.id
        self.objects.append(about)
        self.stamp("REQUEST_START")
        self.stamp("QUEUE_START")
        self._show("TENSOR_QUEUE_INPUT", request.inputs)

    def responded(self, response: InferResponse, ns: int, *, first: bool) -> None:
        """A response has been produced."""
        self._show("TENSOR_BACKEND_OUTPUT", response.outputs)
        if first:
            self.answered(ns)

    def answered(self, ns: int) -> None:
        """The first response is there, or the error in its place; only a client gets any."""
        if self._parent is None:
            self.stamp("INFER_RESPONSE_COMPLETE", ns)

    def computed(self, started_ns: int, phases: Phases) -> None:
        """An execution that started then took the request through these phases."""
        input_end_ns = started_ns + phases.input_ns
        output_start_ns = input_end_ns + phases.infer_ns
        self.stamp("COMPUTE_START", started_ns)
        self.stamp("COMPUTE_INPUT_END", input_end_ns)
        self.stamp("COMPUTE_OUTPUT_START", output_start_ns)
        self.stamp("COMPUTE_END", output_start_ns + phases.output_ns)

    def ended(self, ns: int) -> None:
        """The request has ended, well or not."""
        self.stamp("REQUEST_END", ns)
        self._complete("end")

    def refused(self) -> None:
        """The request was never queued: nothing of it is shown."""
        self.objects.clear()
        self._missing.clear()
        self._keep(self)

    def sent(self) -> None:
        """The frontend is done with the request; idempotent."""
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
    """All elements: numbers with six digits as Triton writes them, text in quotes."""
    if tensor.datatype is Datatype.BYTES:
        texts = (element.decode(errors="replace") for element in tensor.elements())
        return ",".join(json.dumps(text, ensure_ascii=False) for text in texts)
    array = tensor.array().reshape(-1)
    if tensor.datatype is Datatype.BF16:
        array = (array.astype("<u4") << BF16_SHIFT).view("<f4")
    if array.dtype.kind == "f":
        return ",".join(f"{value:g}" for value in array.tolist())
    return ",".join(str(int(value)) for value in array.tolist())
