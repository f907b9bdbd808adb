"""The position of a caller in its trace: the headers of W3C Trace Context, and new ids."""

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import getrandbits

import numpy as np
from numpy.typing import NDArray

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
MOST_STATE_CHARS = 512
"""A longer `tracestate` is dropped; the trace continues without it."""
SAMPLED = 1

FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
PRINTABLE = re.compile(r"[\x20-\x7e\t]*")

TRACE_ID_BITS, SPAN_ID_BITS = 128, 64
MASK = (1 << 64) - 1
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of SplitMix64 (Steele, Lea, Flood, 2014)."""
FACTORS = [np.uint64(each) for each in (GAMMA, FIRST, SECOND)]
SHIFTS = [np.uint64(each) for each in (30, 27, 31, 1)]
"""The same for arrays, and the bit by which the id of a root has room for those below it."""


@dataclass(frozen=True, slots=True)
class ParentSpan:
    """A span, as the parent of spans in another program."""

    trace_id: int
    span_id: int
    flags: int = SAMPLED
    state: str = ""

    @property
    def text(self) -> str:
        """The header `traceparent`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of a request that continues the trace."""
        found = {TRACEPARENT: self.text}
        return found | {TRACESTATE: self.state} if self.state else found


def read_parent(parents: Sequence[str], states: Sequence[str] = ()) -> ParentSpan | None:
    """The parent in the values of `traceparent` and of `tracestate`.

    None without exactly one valid `traceparent` (W3C Trace Context, 3.2 and 4.3): then a new trace
    begins. A later version may have more fields behind those of this one.
    """
    found = FORM.fullmatch(parents[0]) if len(parents) == 1 else None
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest):
        return None
    parent = ParentSpan(int(trace_id, 16), int(span_id, 16), int(flags, 16), _state(states))
    return parent if parent.trace_id and parent.span_id else None


def _state(values: Sequence[str]) -> str:
    text = ",".join(values)
    return text if len(text) <= MOST_STATE_CHARS and PRINTABLE.fullmatch(text) else ""


def new_id(bits: int) -> int:
    """A random id; never 0, which is no id."""
    while not (found := getrandbits(bits)):
        pass
    return found


class ForcedSampling:
    """At most `per_second` requests in any second are traced because their callers ask for it."""

    def __init__(self, per_second: int) -> None:
        self._most = float(per_second)
        self._left = self._most
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Whether one more is traced; `now` is in seconds of a monotonic clock."""
        self._left = min(self._most, self._left + (now - self._at) * self._most)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def epoch_offset_ns() -> int:
    """The epoch minus `time.perf_counter_ns`, by which times of traces become those of spans."""
    return time.time_ns() - time.perf_counter_ns()


class SpanIds:
    """The ids of one trace in OpenTelemetry: that of its caller, and of its outermost span.

    `offset_ns` is `epoch_offset_ns`, once for all spans, so that their durations are exact.
    """

    __slots__ = ("_latest", "model_id", "offset_ns", "parent", "root_id", "trace_id")

    def __init__(
        self, parent: ParentSpan | None, trace_id: int | None = None, root_id: int | None = None
    ) -> None:
        self.parent = parent
        if trace_id is None:
            trace_id = new_id(TRACE_ID_BITS) if parent is None else parent.trace_id
        self.trace_id = trace_id
        self.root_id = getrandbits(SPAN_ID_BITS - 1) + 1 if root_id is None else root_id
        self.model_id = self._latest = self.root_id + 1
        self.offset_ns = epoch_offset_ns()

    def of(self, _: int) -> "SpanIds":
        """These, for a trace of any number."""
        return self

    def next_id(self) -> int:
        """The id of a further span, below that of the outermost model.

        Those of a trace are a random number and its successors: each other program of the trace
        has its own number, and one is faster than as many as there are spans.
        """
        self._latest += 1
        return self._latest

    def as_parent(self, span_id: int) -> ParentSpan:
        """One of its spans, as the parent of others."""
        state = "" if self.parent is None else self.parent.state
        return ParentSpan(self.trace_id, span_id, state=state)


class NumberedIds:
    """The ids of traces by their numbers: SplitMix64, of two random keys.

    So the ids of a trace need not be made, or kept, before something reads them, and those of many
    traces are computed at once.
    """

    def __init__(self) -> None:
        random = np.frombuffer(os.urandom(16), np.uint64)
        self._keys, self._column = random.tolist(), random.reshape(2, 1)

    def of(self, number: int) -> SpanIds:
        """The ids of the trace with that number."""
        high, low = [_mixed(key + number * GAMMA & MASK) for key in self._keys]
        return SpanIds(None, high << 64 | low, low >> 1)

    def columns(self, numbers: NDArray[np.uint64]) -> Sequence[NDArray[np.uint64]]:
        """The same of many: both halves of the ids of their traces, and those of their roots."""
        found: NDArray[np.uint64] = self._column + numbers * FACTORS[0]
        for shift, factor in zip(SHIFTS, FACTORS[1:], strict=False):
            found ^= found >> shift
            found *= factor
        found ^= found >> SHIFTS[2]
        high, low = found
        return high, low, low >> SHIFTS[3]


def _mixed(value: int) -> int:
    """The random number of a state of SplitMix64."""
    value = (value ^ (value >> 30)) * FIRST & MASK
    value = (value ^ (value >> 27)) * SECOND & MASK
    return value ^ (value >> 31)


def parent_in(headers: Iterable[tuple[str, str]]) -> ParentSpan | None:
    """The span that the headers of a request name; None as in `read_parent`."""
    found: dict[str, list[str]] = {TRACEPARENT: [], TRACESTATE: []}
    for name, value in headers:
        if name in found:
            found[name].append(value)
    return read_parent(found[TRACEPARENT], found[TRACESTATE])
