"""One worker's share of the custom metrics: its numbers for families and series."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric

from backends.python.channel import Channel
from backends.python.metric_store import Family, MetricStore, Series
from backends.python.requests import to_json
from backends.python.worker.sluice_worker.messages import ToGateway, ToWorker
from gateway.errors import InferenceError


class MetricCalls:
    """Holds what its worker's model holds; `end` lets go of all of it."""

    def __init__(self, channel: Channel, store: MetricStore) -> None:
        self._channel = channel
        self._store = store
        self._families: dict[int, Family] = {}
        self._series: dict[int, tuple[int, Series]] = {}

    def asked(self, kind: int, values: list[Any]) -> None:
        """Do it, and answer if it is a call; raises what a broken frame raises."""
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

    def shown(self) -> Iterable[Metric]:
        """What this worker's instance has to expose."""
        return tuple(self._store.shown_for(self))

    def end(self) -> None:
        """The worker has ended."""
        for number in tuple(self._families):
            self._drop(number, 0)

    def _call(self, call: int, function: Any, *values: Any) -> None:
        error, value = None, None
        try:
            value = function(*values)
        except InferenceError as failed:
            error = failed.message
        self._channel.send(to_json([ToWorker.DONE, call, error, value]))

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
