"""Calls of a model to the server, and its log lines."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from backends.python.business_logic import (
    BusinessLogic,
    ModelCall,
    ModelManagement,
    Served,
    read_files,
)
from backends.python.codec import TensorReader, read_request
from backends.python.connection import WorkerConnection
from backends.python.executions import WorkerExecutions
from backends.python.metrics import MetricCalls
from backends.python.worker.sluice_worker.protocol import ToGateway
from backends.python.worker_process import LineLimit
from gateway.backend import MetricReading

log = logging.getLogger("sluice.python")

LEVELS = {
    "VERBOSE": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
}


class ServicesOfServer:
    """The calls of a loaded model."""

    def __init__(
        self,
        link: WorkerConnection,
        executions: WorkerExecutions,
        lines: "LogLines",
        metrics: MetricCalls,
        logic: BusinessLogic,
        management: ModelManagement,
    ) -> None:
        self._link = link
        self._executions = executions
        self._lines = lines
        self._metrics = metrics
        self._logic = logic
        self._management = management

    def handle(self, kind: int, found: list[Any], body: memoryview) -> None:
        """Handle a message: answer a call, or begin to."""
        values = found[1:]
        match kind:
            case ToGateway.INFER:
                self._logic.begin(self._call(body, *values))
            case ToGateway.CANCEL_INFER:
                self._logic.cancel(*values)
            case ToGateway.LOG:
                self._lines.write(*values)
            case ToGateway.LOAD_MODEL:
                call, name, config, files = values
                self._management.load(call, name, config, read_files(files, body))
            case ToGateway.UNLOAD_MODEL:
                self._management.unload(*values)
            case ToGateway.MODEL_READY:
                self._management.ready(*values)
            case _:
                self._metrics.handle(kind, values)

    def metrics(self) -> Iterable[MetricReading]:
        """The metrics to expose for the worker's instance."""
        return self._metrics.exposed()

    def waits_for(self) -> list[str]:
        """The models that it has called, or is loading or unloading."""
        return [*self._logic.models, *self._management.models]

    def cancel_abandoned(self) -> None:
        """Cancel the calls of requests whose clients have disconnected."""
        self._logic.cancel_abandoned()

    def end(self) -> None:
        """Cancel all calls: the worker has ended."""
        self._logic.end()
        self._management.end()
        self._metrics.end()

    async def ended(self) -> None:
        """Wait until no call is in progress, after `end`."""
        await self._logic.ended()
        await self._management.ended()

    def _call(
        self,
        body: memoryview,
        number: int,
        described: list[Any],
        decoupled: bool,
        served: Served,
        over_work: bool,
    ) -> ModelCall:
        tensors = TensorReader(body, self._link.incoming)
        traced = self._executions.request(described[0])
        caller = self._executions.caller if traced is None else traced.caller
        request = read_request(described, tensors, traced, caller)
        return ModelCall(
            number=number,
            request=request,
            decoupled=decoupled,
            served=served,
            over_work=over_work,
        )


class LogOnly:
    """The calls of a model that completes its config: log lines only."""

    def __init__(self, lines: "LogLines") -> None:
        self._lines = lines

    def handle(self, kind: int, found: list[Any], body: memoryview) -> None:
        """Write a log line; the worker itself refuses all other calls."""
        if kind == ToGateway.LOG:
            self._lines.write(*found[1:])

    def metrics(self) -> Iterable[MetricReading]:
        """No metrics."""
        return ()

    def waits_for(self) -> list[str]:
        """No models."""
        return []

    def cancel_abandoned(self) -> None:
        """No calls."""

    def end(self) -> None:
        """Cancel all calls: the worker has ended."""

    async def ended(self) -> None:
        """No calls."""


class LogLines:
    """Log lines of a model, attributed to its file and line."""

    def __init__(self, about: Mapping[str, object]) -> None:
        self._about = about
        self._limit = LineLimit()

    def write(self, level: str, message: str, file: str, line: int) -> None:
        """Write a line, unless the limit is reached."""
        number = LEVELS[level]
        if not log.isEnabledFor(number):
            return
        if self._limit.allows():
            if dropped := self._limit.take_dropped():
                log.warning("log lines dropped", extra={**self._about, "lines_dropped": dropped})
            extra = dict(self._about)
            log.handle(log.makeRecord(log.name, number, file, line, message, (), None, None, extra))
