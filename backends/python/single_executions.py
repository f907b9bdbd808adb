"""Executions of one request without a task."""

from collections.abc import Callable

from backends.python.execution import WorkerExecution
from backends.python.executions import ExecuteCall, WorkerExecutions
from backends.python.quarantine import Quarantine
from gateway.backend import Begun, Reader
from gateway.messages import InferRequest


class WorkerSingles:
    """Executes small single requests of a model that is not decoupled without a task."""

    def __init__(self, executions: WorkerExecutions, quarantine: Quarantine) -> None:
        self._executions = executions
        self._quarantine = quarantine

    def take(self, request: InferRequest) -> bool:
        return not self._quarantine.suspects and self._executions.can_begin_at_once(request)

    def begin(self, request: InferRequest, reader: Reader) -> Begun:
        call = ExecuteCall([request], self._executions)
        execution = self._executions.begin_at_once([request], (0,))
        begun = BegunExecution(execution, self._executions.release, reader)
        if call.cancelled:
            call.catch_up()
        begun.look()
        return begun


class BegunExecution:
    """Passes the answers of an execution on to its reader; `release` is that of the worker."""

    __slots__ = ("_execution", "_reader", "_release")

    def __init__(
        self,
        execution: WorkerExecution,
        release: Callable[[WorkerExecution], None],
        reader: Reader,
    ) -> None:
        self._execution = execution
        self._release = release
        self._reader = reader
        execution.listener = self.look

    def look(self) -> None:
        """Pass on what has arrived; end once `execute` has returned and all is read."""
        execution = self._execution
        try:
            for _, answer in execution.take():
                self._reader.take(answer)
        except Exception as error:  # noqa: BLE001 - of the reader; passed on at the end
            execution.failure = error
        if execution.failure is not None:
            self._drop()
        if execution.over and not execution.unread and execution.listener is not None:
            execution.listener = None
            self._drop()
            self._reader.over(execution.failure)

    def abandon(self) -> None:
        self._drop()
        self.look()

    def _drop(self) -> None:
        if not self._execution.released:
            self._release(self._execution)
