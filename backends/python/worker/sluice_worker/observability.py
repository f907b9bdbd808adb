"""Custom metrics and log lines of model.py."""

import itertools
import math
import sys
import weakref
from enum import IntEnum
from typing import Any

from .errors import TritonModelException
from .protocol import ToGateway
from .work import worker

MESSAGE_LIMIT = 1 << 16
"""Characters of one line."""


class MetricKind(IntEnum):
    """Triton's kinds of metrics."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


_numbers = itertools.count(1)


class MetricFamily:
    """A metric family; objects of the same name and kind share one.

    Its series are dropped with the last object of that name.
    """

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        if not isinstance(kind, MetricKind):
            raise TypeError(f"kind must be one of MetricFamily's, found {kind!r}")
        self.kind = kind
        self.number = 0
        number = next(_numbers)
        values = (number, name, description, self.kind.name.lower())
        _ask("Error when creating MetricFamily", ToGateway.METRIC_FAMILY, *values)
        self.number = number

    def Metric(self, labels: Any = None, buckets: Any = None) -> "Metric":
        """A series of this family; equal labels share one series."""
        return Metric(self, labels, buckets)

    def __del__(self) -> None:
        if getattr(self, "number", 0):
            gone = [ToGateway.METRIC_GONE, self.number, 0]
            worker().connection.send_from_finalizer(gone)


class Metric:
    """One series of a family."""

    def __init__(self, family: MetricFamily, labels: Any, buckets: Any) -> None:
        self._family = weakref.ref(family)
        self._kind, self._family_number = family.kind, family.number
        self._number = 0
        _check_labels(labels)
        _check_buckets(family.kind, buckets)
        number = next(_numbers)
        values = (family.number, number, labels or {}, buckets or [])
        _ask("Error when creating Metric", ToGateway.METRIC, *values)
        self._number = number

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge."""
        self._check("increment", MetricKind.COUNTER, MetricKind.GAUGE)
        if self._kind is MetricKind.COUNTER and value < 0:
            self._refuse(
                "increment",
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by "
                "non-negative values.",
            )
        self._change("increment", value)

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._check("set", MetricKind.GAUGE)
        self._change("set", value)

    def observe(self, value: float) -> None:
        """Count a value in a histogram."""
        self._check("observe", MetricKind.HISTOGRAM)
        self._change("observe", value)

    def value(self) -> float:
        """The value of a counter or a gauge, with the changes of other instances."""
        self._check("get", MetricKind.COUNTER, MetricKind.GAUGE)
        return float(_ask("Failed to get metric value", ToGateway.METRIC_VALUE, self._number))

    def _check(self, operation: str, *kinds: MetricKind) -> None:
        if self._family() is None:
            raise TritonModelException(
                f"Failed to {operation} metric value: Invalid metric operation as the "
                "corresponding 'MetricFamily' has been deleted. The 'MetricFamily' object should "
                "be deleted AFTER its corresponding 'Metric' objects have been deleted."
            )
        if self._kind not in kinds:
            kind = f"TRITONSERVER_METRIC_KIND_{self._kind.name}"
            self._refuse(operation, f"{kind} does not support {operation.capitalize()}")

    def _refuse(self, operation: str, reason: str) -> None:
        text = worker().calls.refused(reason)
        raise TritonModelException(f"Failed to {operation} metric value: {text}")

    def _change(self, operation: str, value: float) -> None:
        number = float(value)
        if not math.isfinite(number):
            self._refuse(operation, f"a metric cannot stand at {number}")
        change = [ToGateway.METRIC_CHANGE, self._number, operation, number]
        worker().connection.send(change)

    def __del__(self) -> None:
        # A dropped family has dropped its series.
        if getattr(self, "_number", 0) and self._family() is not None:
            gone = [ToGateway.METRIC_GONE, self._family_number, self._number]
            worker().connection.send_from_finalizer(gone)


def _ask(failure: str, kind: ToGateway, *values: Any) -> Any:
    try:
        return worker().calls.ask(kind, *values)
    except TritonModelException as error:
        raise TritonModelException(f"{failure}: {error}") from None


def _check_labels(labels: Any) -> None:
    if labels is not None and not isinstance(labels, dict):
        raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
    texts = [*(labels or {}).keys(), *(labels or {}).values()]
    if not all(isinstance(each, str) for each in texts):
        reason = worker().calls.refused("attempt to access JSON non-string as string")
        raise TritonModelException(f"Error when creating Metric: {reason}")


def _check_buckets(kind: MetricKind, buckets: Any) -> None:
    if buckets is not None and not isinstance(buckets, list):
        raise TritonModelException("Failed to create metric. Buckets must be a list.")
    if kind is not MetricKind.HISTOGRAM and buckets:
        raise TritonModelException("Failed to create metric. Unexpected buckets found.")
    if kind is MetricKind.HISTOGRAM and buckets is None:
        raise TritonModelException("Failed to create metric. Missing required buckets.")


class Level(IntEnum):
    """Triton's levels."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class Logger:
    """Writes to the server's log, with file and line in model.py; usable in every stage."""

    LogLevel = Level
    INFO = Level.INFO
    WARNING = Level.WARNING
    ERROR = Level.ERROR
    VERBOSE = Level.VERBOSE

    @staticmethod
    def log(message: str, level: Level = Level.INFO) -> None:
        """Log a line of that level."""
        _log(level, message)

    @staticmethod
    def log_info(message: str) -> None:
        """Log at INFO."""
        _log(Level.INFO, message)

    @staticmethod
    def log_warn(message: str) -> None:
        """Log at WARNING."""
        _log(Level.WARNING, message)

    @staticmethod
    def log_error(message: str) -> None:
        """Log at ERROR."""
        _log(Level.ERROR, message)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Log at VERBOSE, which is DEBUG in the server's log."""
        _log(Level.VERBOSE, message)


def _log(level: Level, message: str) -> None:
    if not isinstance(message, str):
        raise TypeError(f"a message for the log must be a str, found {type(message)}")
    if not isinstance(level, Level):
        raise TypeError(f"level must be one of Logger's, found {level!r}")
    place = sys._getframe(2)  # noqa: SLF001 - the caller, without reading its source
    line = [
        ToGateway.LOG,
        level.name,
        message[:MESSAGE_LIMIT],
        place.f_code.co_filename,
        place.f_lineno,
    ]
    worker().connection.send(line)
