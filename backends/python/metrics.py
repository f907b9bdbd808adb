"""Custom metrics that models make (python backend 3.7)."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.python.codec import to_json
from backends.python.connection import FrameSocket
from backends.python.worker.sluice_worker.protocol import ToGateway, ToWorker
from gateway.backend import MetricReading
from gateway.errors import Code, InferenceError

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
OWN = re.compile(r"gateway_|nv_(inference|model|cache|cpu|gpu|power|energy|pinned)_")
KINDS = ("counter", "gauge", "histogram")

Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Series:
    """One series of a family; `holders` are the objects of models for it, in order.

    A histogram has a count for each upper bound in `buckets`, and one above.
    """

    labels: Labels
    buckets: tuple[float, ...] = ()
    value: float = 0.0
    counts: list[int] = field(default_factory=list)
    holders: list[object] = field(default_factory=list)

    def observe(self, value: float) -> None:
        """Count a value in its bucket."""
        self.counts[bisect_left(self.buckets, value)] += 1
        self.value += value


@dataclass(slots=True)
class Family:
    """The series of one name; dropped with its last holder."""

    name: str
    description: str
    kind: str
    series: dict[Labels, Series] = field(default_factory=dict)
    holders: list[object] = field(default_factory=list)


class MetricStore:
    """Families of all workers by name; holders keep families and series alive."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def family(self, name: str, description: str, kind: str, holder: object) -> Family:
        """The family of that name, of any description; INVALID_ARG for a bad name or kind."""
        if not NAME.fullmatch(name) or kind not in KINDS:
            raise InferenceError(
                Code.INVALID_ARG, f"Invalid metric name: '{name}' of kind '{kind}'"
            )
        if OWN.match(name):
            raise InferenceError(
                Code.INVALID_ARG, f"Invalid metric name: '{name}' may be one of the server's own"
            )
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = Family(name, description, kind)
        if family.kind != kind:
            raise InferenceError(Code.INVALID_ARG, "Family name already exists with different type")
        family.holders.append(holder)
        return family

    def series(
        self,
        family: Family,
        labels: Mapping[str, str],
        buckets: Sequence[float],
        holder: object,
    ) -> Series:
        """The family's series with those labels; INVALID_ARG if it cannot be exposed."""
        for label in labels:
            if not LABEL.fullmatch(label):
                raise InferenceError(
                    Code.INVALID_ARG, f"'{label}' is no name for a label of metric '{family.name}'"
                )
        if list(buckets) != sorted(set(buckets)):
            raise InferenceError(
                Code.INVALID_ARG, f"buckets of metric '{family.name}' are not in ascending order"
            )
        key = tuple(sorted((label, str(value)) for label, value in labels.items()))
        series = family.series.get(key)
        if series is None:
            counts = [0] * (len(buckets) + 1)
            series = family.series[key] = Series(key, tuple(buckets), counts=counts)
        series.holders.append(holder)
        return series

    def drop_series(self, family: Family, series: Series, holder: object) -> None:
        """Remove a holder; the series is dropped with the last one."""
        series.holders.remove(holder)
        if not series.holders:
            family.series.pop(series.labels, None)

    def drop_family(self, family: Family, holder: object) -> None:
        """Remove a holder; the family is dropped with the last one."""
        family.holders.remove(holder)
        if not family.holders:
            self._families.pop(family.name, None)

    def exposed_for(self, holder: object) -> Iterator[MetricReading]:
        """The series with this first holder: all holders together show each series once."""
        for family in self._families.values():
            if shown := [s for s in family.series.values() if s.holders[0] is holder]:
                yield _metric(family, shown)


def _metric(family: Family, series: Iterable[Series]) -> MetricReading:
    metric = MetricReading(family.name, family.description, family.kind)
    for each in series:
        labels = dict(each.labels)
        if family.kind == "histogram":
            _add_histogram(metric, family.name, each, labels)
        else:
            metric.add_sample(family.name, labels, each.value)
    return metric


def _add_histogram(
    metric: MetricReading, name: str, series: Series, labels: dict[str, str]
) -> None:
    total = 0
    for bound, count in zip((*series.buckets, float("inf")), series.counts, strict=True):
        total += count
        le = "+Inf" if bound == float("inf") else f"{bound:g}"
        metric.add_sample(f"{name}_bucket", {**labels, "le": le}, total)
    metric.add_sample(f"{name}_count", labels, total)
    metric.add_sample(f"{name}_sum", labels, series.value)


class MetricCalls:
    """The families and series of one worker's model; `end` drops them."""

    def __init__(self, socket: FrameSocket, store: MetricStore) -> None:
        self._socket = socket
        self._store = store
        self._families: dict[int, Family] = {}
        self._series: dict[int, tuple[int, Series]] = {}

    def handle(self, kind: int, values: list[Any]) -> None:
        """Handle a message, and answer it if it is a call; raises what a broken frame raises."""
        match kind:
            case ToGateway.METRIC_FAMILY:
                self._call(values[0], self._add_family, *values[1:])
            case ToGateway.METRIC:
                self._call(values[0], self._add_series, *values[1:])
            case ToGateway.METRIC_CHANGE:
                self._change(*values)
            case ToGateway.METRIC_VALUE:
                self._call(values[0], self._value, *values[1:])
            case ToGateway.METRIC_GONE:
                self._drop(*values)
            case _:
                raise ValueError(f"message of kind {kind}")

    def exposed(self) -> Iterable[MetricReading]:
        """The metrics to expose for this worker's instance."""
        return tuple(self._store.exposed_for(self))

    def end(self) -> None:
        """Drop all: the worker has ended."""
        for number in tuple(self._families):
            self._drop(number, 0)

    def _call(self, call: int, function: Any, *values: Any) -> None:
        error, value = None, None
        try:
            value = function(*values)
        except InferenceError as failed:
            error = failed.message
        self._socket.send(to_json([ToWorker.DONE, call, error, value]))

    def _add_family(self, number: int, name: str, description: str, kind: str) -> None:
        self._families[number] = self._store.family(name, description, kind, self)

    def _add_series(
        self, family: int, number: int, labels: Mapping[str, str], buckets: Sequence[float] | None
    ) -> None:
        found = self._families[family]
        self._series[number] = family, self._store.series(found, labels or {}, buckets or (), self)

    def _change(self, number: int, operation: str, value: float) -> None:
        _, series = self._series[number]
        match operation:
            case "increment":
                series.value += value
            case "set":
                series.value = value
            case "observe":
                series.observe(value)
            case _:
                raise ValueError(f"operation {operation}")

    def _value(self, number: int) -> float:
        return self._series[number][1].value

    def _drop(self, family: int, number: int) -> None:
        if number:
            self._drop_series(number)
            return
        # The worker may hold the same family under several numbers.
        for each in [n for n, (of, _) in self._series.items() if of == family]:
            self._drop_series(each)
        self._store.drop_family(self._families.pop(family), self)

    def _drop_series(self, number: int) -> None:
        family, series = self._series.pop(number)
        self._store.drop_series(self._families[family], series, self)
