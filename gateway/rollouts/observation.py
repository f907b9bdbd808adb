"""A request as guardrails see it: its times, tokens, end and contents."""

import math
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from gateway.cuda_driver import DeviceMemory
from gateway.errors import Code, InferenceError, Refusal
from gateway.messages import InferResponse, StreamRecorder
from gateway.observability.request_record import Record
from gateway.observability.stream_tap import StreamTap
from gateway.tensor import BF16_BITS, LENGTH_BYTES, NUMPY_TYPES, Buffer, Datatype, Tensor

FAULTS = frozenset({Code.UNKNOWN, Code.INTERNAL, Code.UNAVAILABLE})
"""The codes of failures that are the server's fault: not the client's, and no disconnect."""
FLOATS = frozenset({Datatype.FP16, Datatype.FP32, Datatype.FP64, Datatype.BF16})
WITHOUT_NUMBERS = (tuple, DeviceMemory)
"""Data of a tensor that are not searched for NaN and infinity."""
SUMMED = {Datatype.FP32: ("f", 4), Datatype.FP64: ("d", 8)}
"""The formats of `memoryview`, and sizes in bytes, of the floats that Python adds."""
SUMMED_BYTES = 256
"""The most bytes of them: between two requests numpy takes as long for a few as for these."""
BF16_EXPONENT = 0x7F80
"""The bits that are all set in NaN and in infinity."""
MOST_ELEMENTS = 1 << 16
"""Elements of an output that are searched for NaN and infinity; of more, a sample."""


class Arm(IntEnum):
    """The version of a request; a copy of stable's request is sent to the candidate, too."""

    STABLE = 0
    CANDIDATE = 1
    COPY = 2


class Observer(Protocol):
    """Takes each observation twice: when its request is admitted, and when it has ended."""

    reads_content: bool
    reads_numbers: bool

    def admit(self, observation: "Observation") -> None:
        """Take a request that has just been admitted."""

    def end(self, observation: "Observation") -> None:
        """Take the end of a request."""


class Observation(StreamTap):
    """The tap of one request.

    Times are of `time.perf_counter_ns`, 0 if the event has not happened. `key` is the digest of
    the part of the request that its version sticks to, empty without one. `tokens` are those of
    the answer that the record has counted. `failed`: by the server's fault; `complete`: without any
    error. Of `stands_for` requests of its version only this one is observed.
    """

    __slots__ = (
        "_observer",
        "_reads",
        "admitted_ns",
        "arm",
        "block",
        "complete",
        "differs",
        "ended_ns",
        "failed",
        "finish_reason",
        "first_ns",
        "has_content",
        "has_nan",
        "key",
        "last_ns",
        "received_ns",
        "stands_for",
        "tokens",
    )

    block: Any

    def __init__(self, observer: Observer, arm: Arm, key: bytes = b"", stands_for: int = 1) -> None:
        super().__init__(None)
        self._observer = observer
        self._reads = observer.reads_content or observer.reads_numbers
        self.arm = arm
        self.key = key
        self.stands_for = stands_for
        self.admitted_ns = self.received_ns = self.first_ns = self.last_ns = self.ended_ns = 0
        self.tokens = 0
        self.finish_reason = ""
        self.failed = self.complete = self.has_content = self.has_nan = self.differs = False

    def recorder(self, record: Record, account: StreamRecorder) -> StreamRecorder:
        """See `Tap`: the request is admitted."""
        self.admitted_ns, self.received_ns = record.submitted_ns, record.received_ns
        self._observer.admit(self)
        return super().recorder(record, account)

    def responded(self, response: InferResponse) -> None:
        """Note the tokens so far, the time of the first response, and the contents."""
        self.account.responded(response)
        record = self.record
        self.tokens = record.completion_tokens
        if not self.first_ns:
            self.first_ns = record.progress_ns
        usage = response.usage
        if usage is not None:
            self.finish_reason = usage.finish_reason or self.finish_reason
        if response.error is not None:
            self.failed = self.failed or response.error.code in FAULTS
        if self._reads:
            self._read(response)

    def delivered(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> None:
        """As `responded` of each."""
        self.account.delivered(name, texts, tokens)
        record = self.record
        self.tokens = record.completion_tokens
        if not self.first_ns:
            self.first_ns = record.progress_ns
        if self._reads and not self.has_content:
            self.has_content = any(texts)

    def ended(self, error: InferenceError | None) -> None:
        """Take the end to the observer."""
        self.account.ended(error)
        self.last_ns, self.ended_ns = self.record.progress_ns, time.perf_counter_ns()
        self.finish(error)

    def finish(self, error: InferenceError | None) -> None:
        """Record the result of the request; its own deadline is none, as a disconnect."""
        if error is None:
            self.complete = not self.failed
        else:
            is_of_caller = isinstance(error, Refusal) and error.of_caller
            self.failed = error.code in FAULTS and not is_of_caller
        self._observer.end(self)

    def _read(self, response: InferResponse) -> None:
        if not self.has_content:
            self.has_content = any(map(_has_content, response.outputs))
        if self._observer.reads_numbers and not self.has_nan:
            self.has_nan = any(map(_has_nan, response.outputs))


def _has_content(tensor: Tensor) -> bool:
    if tensor.datatype is not Datatype.BYTES:
        return 0 not in tensor.shape
    data = tensor.data
    if isinstance(data, tuple):
        return any(data)
    return not isinstance(data, DeviceMemory) and len(data) > LENGTH_BYTES * tensor.count


def _has_nan(tensor: Tensor) -> bool:
    """Whether a float of the sample is no number; data in the memory of a GPU is not read."""
    data = tensor.data
    if tensor.datatype not in FLOATS or isinstance(data, WITHOUT_NUMBERS):
        return False
    if len(data) <= SUMMED_BYTES and _has_finite_sum(tensor.datatype, data):
        return False
    dtype = NUMPY_TYPES.get(tensor.datatype, BF16_BITS)
    values = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
    if values.size > MOST_ELEMENTS:
        values = values[:: -(-values.size // MOST_ELEMENTS)]
    if tensor.datatype is Datatype.BF16:
        return bool(((values & BF16_EXPONENT) == BF16_EXPONENT).any())
    return b"\0" in np.isfinite(values).tobytes()  # half of the instructions of `all`


def _has_finite_sum(datatype: Datatype, data: Buffer) -> bool:
    """Whether a sum of floats is known and finite: then none of them is NaN or infinite."""
    code, size = SUMMED.get(datatype, ("", 1))
    if not code or len(data) % size:
        return False
    return math.isfinite(sum(memoryview(data).cast("B").cast(code)))  # type: ignore[call-overload]
