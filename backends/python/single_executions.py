"""Executions of one request without a task."""

import logging

from backends.python.execution import WorkerExecution
from backends.python.executions import ExecuteCall, WorkerExecutions
from backends.python.quarantine import Quarantine
from gateway.backend import Begun, Reader
from gateway.messages import InferRequest

log = logging.getLogger("sluice.python")


class WorkerSingles:
    """Executes small single requests of a model that is not decoupled without a task."""

    def __init__(self, executions: WorkerExecutions, quarantine: Quarantine, code: bytes) -> None:
        self._executions = executions
        self._quarantine = quarantine
        self._code = code

    def accepts(self, request: InferRequest) -> bool:
        quarantine = self._quarantine
        if quarantine.suspects.found and quarantine.is_suspect(self._code, request):
            return False
        return self._executions.can_begin_at_once(request)

    def begin(self, request: InferRequest, reader: Reader) -> Begun:
        call = ExecuteCall([request], self._executions)
        execution = self._executions.begin_at_once([request], (0,))
        begun = BegunExecution(execution, self, reader)
        if call.cancelled:
            call.catch_up()
        if execution.returned or execution.unread:
            begun.look()  # it has ended, or is free for another execution already
        return begun

    def release(self, execution: WorkerExecution) -> None:
        """Take back all that an execution holds, before its end."""
        self._executions.release(execution)

    def ended(self, execution: WorkerExecution) -> None:
        """Clear its request if that became a suspect meanwhile."""
        if self._quarantine.suspects.found and not execution.aborted:
            self._quarantine.survived(self._code, execution.requests)


class BegunExecution:
    """Passes the answers of an execution on to its reader."""

    __slots__ = ("_execution", "_looking", "_reader", "_singles")

    def __init__(self, execution: WorkerExecution, singles: WorkerSingles, reader: Reader) -> None:
        self._execution = execution
        self._looking = False
        self._singles = singles
        self._reader = reader
        execution.listener = self.look

    def look(self) -> None:
        """Pass on what has arrived; end once `execute` has returned and all is read."""
        execution = self._execution
        if self._looking:
            return  # the outer call continues
        self._looking = True
        try:
            while execution.unread and (answers := execution.take()):
                for _, answer in answers:
                    self._reader.take(answer)
        except Exception as error:  # noqa: BLE001 - of a frontend; passed on at the end
            execution.failure = error
        self._looking = False
        if execution.failure is not None:
            self._release()
        if execution.over and not execution.unread and execution.listener is not None:
            self._end()

    def abandon(self) -> None:
        self._release()
        self.look()

    def _release(self) -> None:
        if not self._execution.released:
            self._singles.release(self._execution)

    def _end(self) -> None:
        execution = self._execution
        execution.listener = None
        error, execution.failure = execution.failure, None
        self._singles.ended(execution)
        try:
            self._reader.over(error)
        except Exception:
            # Around one execution: the worker's other executions continue.
            log.exception("end of an execution failed")
