"""Who answers what a worker asks of the server, or tells it?"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import Metric

from backends.python.business_logic import BusinessLogic, ModelCall, Served
from backends.python.codec import TensorReader, read_request
from backends.python.connection import WorkerConnection
from backends.python.executions import WorkerExecutions
from backends.python.metrics import MetricCalls
from backends.python.model_management import ModelManagement, read_files
from backends.python.worker.sluice_worker.protocol import ToGateway
from backends.python.worker_output import LineLimit

log = logging.getLogger("sluice.python")

LEVELS = {
    "VERBOSE": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
}


class ServicesOfServer:
    """What a loaded model may ask for."""

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

    def asked(self, kind: int, found: list[Any], body: memoryview) -> None:
        """Answer, or begin to."""
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
                self._metrics.asked(kind, values)

    def shown(self) -> Iterable[Metric]:
        """The metrics that the worker's instance has to expose."""
        return self._metrics.shown()

    def waits_for(self) -> list[str]:
        """The models that it has called, or asked to load, and that have not answered."""
        return [*self._logic.models, *self._management.models]

    def left(self) -> None:
        """What was asked on behalf of whoever has left ends with them."""
        self._logic.cancel_left()

    def end(self) -> None:
        """The worker has ended."""
        self._logic.end()
        self._management.end()
        self._metrics.end()

    async def ended(self) -> None:
        """Wait until nothing is under way; comes after `end`."""
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
        request = read_request(described, tensors, self._executions.request(described[0]))
        return ModelCall(
            number=number,
            request=request,
            decoupled=decoupled,
            served=served,
            over_work=over_work,
        )


class LogOnly:
    """What a model may ask for that only completes its configuration: lines in the log."""

    def __init__(self, lines: "LogLines") -> None:
        self._lines = lines

    def asked(self, kind: int, found: list[Any], body: memoryview) -> None:
        """Write it, if it is one; the worker refuses everything else by itself."""
        if kind == ToGateway.LOG:
            self._lines.write(*found[1:])

    def shown(self) -> Iterable[Metric]:
        """No metrics."""
        return ()

    def waits_for(self) -> list[str]:
        """No models."""
        return []

    def left(self) -> None:
        """Nothing is asked on behalf of anybody."""

    def end(self) -> None:
        """The worker has ended."""

    async def ended(self) -> None:
        """Nothing is ever under way."""


class LogLines:
    """Lines of a model's own, as if they had been written at its file and line."""

    def __init__(self, about: Mapping[str, object]) -> None:
        self._about = about
        self._limit = LineLimit()

    def write(self, level: str, message: str, file: str, line: int) -> None:
        """Write one, unless there have been too many."""
        number = LEVELS[level]
        if not log.isEnabledFor(number):
            return
        if self._limit.allows():
            if dropped := self._limit.take_dropped():
                log.warning("logged too much", extra={**self._about, "lines_dropped": dropped})
            extra = dict(self._about)
            log.handle(log.makeRecord(log.name, number, file, line, message, (), None, None, extra))
