"""Exemplars: for each bucket of a histogram the latest observation with a trace."""

from gateway.backend import Exemplar
from gateway.observability.statistics import Histogram
from gateway.observability.traceparent import epoch_offset_ns


def exemplars(histogram: Histogram) -> dict[int, Exemplar]:
    """The exemplars by the indexes of their buckets."""
    found, offset_ns = histogram.exemplars or {}, epoch_offset_ns()
    return {
        bucket: Exemplar({"trace_id": f"{ids.of(n).trace_id:032x}"}, value, (ns + offset_ns) / 1e9)
        for bucket, (ids, n, value, ns) in found.items()
    }
