"""Lines through the readings of a server: whether its memory and its tables grow."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtests.support.curves import Panel

MEMORY, DESCRIPTORS, THREADS, TASKS = "memory, bytes", "descriptors", "threads", "tasks"
MIB, TEN_MINUTES = 2**20, 600.0
MOST_MEMORY = MIB
"""Growth of the memory in ten minutes."""
LEAST_SECS = 600.0
"""The memory is judged by runs of this length; the allocator makes that of shorter ones rise."""
LEAST_READINGS = 5
ERRORS = 4.0
"""Standard errors by which a slope is above 0."""
LEAST_RISE = 2.0
MODELS = 40
"""More than the models of the storm, one of which has two versions."""
SUSPECTS = 40
"""The workers that are killed in ten minutes: so long the requests of each are suspects."""
KEPT = {
    "Admission._costs": MODELS,
    "LocalCache._entries": 10_000,
    "InferResponse objects": 20_000,
    "IncomingSegments._maps": 64 * 50,
    "IncomingSegments._views": 64 * 50,
    "MessageMemo._headers": 256,
    "MessageMemo._known": 256,
    "ModelCosts objects": MODELS,
    "ModelWaits objects": MODELS,
    "ModelWaits.counts": 5 * MODELS,
    "RequestMemo": 4 * 256,
    "Suspect objects": SUSPECTS,
    "Suspect.ended": SUSPECTS,
    "Suspects.found": SUSPECTS,
    "Waits.models": MODELS,
}
"""Tables that are filled during a run, and their bounds: the cache of 1 MiB with its responses, the
segments of 50 workers, the memos of the frontends and the codecs, the suspects of killed workers,
what is known of each model that has had requests."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The counts of a server during the storm: memory, descriptors, threads, tasks, tables."""

    secs: float
    counts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Line:
    """The line of least squares through some values: its slope, with its standard error."""

    per_sec: float
    error: float
    mean: float

    @property
    def per_ten_minutes(self) -> float:
        """The growth in ten minutes."""
        return self.per_sec * TEN_MINUTES


def line(secs: Sequence[float], values: Sequence[float]) -> Line:
    """The line through these values, at least three."""
    count = len(secs)
    middle, mean = sum(secs) / count, sum(values) / count
    spread = sum((at - middle) ** 2 for at in secs)
    moments = ((at - middle) * (value - mean) for at, value in zip(secs, values, strict=True))
    slope = sum(moments) / spread
    rests = (value - mean - slope * (at - middle) for at, value in zip(secs, values, strict=True))
    error = math.sqrt(sum(each**2 for each in rests) / (count - 2) / spread)
    return Line(slope, error, mean)


def second_half(readings: Sequence[Reading]) -> Mapping[str, Line]:
    """The line of each count through the second half of a run; none without enough readings."""
    half = _half(readings)
    if len(half) < LEAST_READINGS:
        return {}
    secs = [each.secs for each in half]
    names = sorted({name for each in half for name in each.counts})
    return {name: line(secs, [each.counts.get(name, 0) for each in half]) for name in names}


def few(readings: Sequence[Reading]) -> Sequence[str]:
    """The lack of readings for lines, in words."""
    count = len(_half(readings))
    if count >= LEAST_READINGS:
        return []
    return [f"{count} readings in the second half, expected at least {LEAST_READINGS}"]


def _half(readings: Sequence[Reading]) -> Sequence[Reading]:
    begin = readings[-1].secs / 2 if readings else 0.0
    return [each for each in readings if each.secs >= begin]


def growing(readings: Sequence[Reading], after: Mapping[str, float]) -> Sequence[str]:
    """The counts that grow, in words; `after` are those after the storm, without requests.

    A table that grows and is as long when no client is left keeps what has ended.
    """
    found = []
    secs = readings[-1].secs if readings else 0.0
    for name, each in second_half(readings).items():
        rise = each.per_sec * secs / 2
        if each.per_sec <= ERRORS * each.error:
            continue
        if name == MEMORY:
            if secs >= LEAST_SECS and each.per_ten_minutes > MOST_MEMORY:
                found.append(f"{name}: {each.per_ten_minutes / MIB:.1f} MiB in ten minutes")
        elif rise >= LEAST_RISE and after.get(name, 0) > max(
            each.mean + rise / 4, KEPT.get(name, 0)
        ):
            grown = f"{name}: {each.per_ten_minutes:.1f} more in ten minutes"
            found.append(f"{grown}, {after[name]:,.0f} without clients")
    return found


def rows(readings: Sequence[Reading]) -> Mapping[str, str]:
    """The growth of each count in ten minutes, for a table; of the tables only the fastest."""
    found = second_half(readings)
    first = (MEMORY, DESCRIPTORS, THREADS, TASKS)
    tables = [name for name in found if name not in first]
    fastest = sorted(tables, key=lambda name: found[name].per_sec, reverse=True)[:SHOWN_TABLES]
    return {
        name: f"{found[name].per_ten_minutes:+,.1f} ± {found[name].error * TEN_MINUTES:,.1f}"
        for name in (*first, *fastest)
        if name in found
    }


SHOWN_TABLES = 5


def panels(readings: Sequence[Reading]) -> Sequence[Panel]:
    """The curves of a run."""
    grown = list(rows(readings))
    names = grown or [MEMORY, DESCRIPTORS, THREADS, TASKS]
    return [Panel(name, [each.counts.get(name, 0) for each in readings]) for name in names]
