"""Exemplars: for each bucket of a histogram the latest observation with a trace."""

import time
from bisect import bisect_left

from gateway.backend import Exemplar
from gateway.observability.statistics import Histogram
from gateway.observability.trace import Trace


def exemplify(histogram: Histogram, value: float, trace: Trace) -> None:
    """Keep an observation as exemplar of its bucket, if its trace becomes spans."""
    if trace.spans is None:
        return
    if histogram.exemplars is None:
        histogram.exemplars = {}
    bucket = bisect_left(histogram.bounds, value)
    histogram.exemplars[bucket] = trace.spans.trace_id, value, time.time()


def exemplars(histogram: Histogram) -> dict[int, Exemplar]:
    """The exemplars by the indexes of their buckets."""
    found = histogram.exemplars or {}
    return {
        bucket: Exemplar({"trace_id": f"{trace_id:032x}"}, value, time_secs)
        for bucket, (trace_id, value, time_secs) in found.items()
    }
