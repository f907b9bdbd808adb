"""One instance of a Python model."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import partial

from prometheus_client.core import Metric

from backends.python.execution import Quarantine
from backends.python.executions import WorkerExecutions
from backends.python.running_worker import RunningWorker
from gateway.backend import Answer, Instance
from gateway.messages import Cancellation, InferRequest


class PythonInstance(Instance):
    """Executes in one worker, one execution at a time.

    `code` identifies the state of the model's files, for the quarantine. `checks_readiness`: the
    model has an `is_ready` of its own.
    """

    def __init__(
        self,
        worker: RunningWorker,
        quarantine: Quarantine,
        code: bytes,
        *,
        checks_readiness: bool,
    ) -> None:
        self.death = worker.died
        self._worker = worker
        self._executions = worker.executions
        self._quarantine = quarantine
        self._code = code
        self._checks_readiness = checks_readiness

    @property
    def alive(self) -> bool:  # type: ignore[override]  # most need no property
        return self._worker.alive

    @property
    def metrics(self) -> Iterable[Metric]:
        return self._worker.services.metrics()

    @property
    def waits_for(self) -> Iterable[str]:
        return self._worker.services.waits_for()

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        plan = self._quarantine.plan(self._code, requests)
        call = _ExecuteCall(requests, self._executions)
        for refused in plan.refused:
            yield refused
        for group in plan.groups:
            if not (indexes := call.waited_for(group)):
                continue
            execution = await self._executions.begin([requests[i] for i in indexes], indexes)
            try:
                async with execution:
                    call.catch_up()
                    while answers := await execution.answers():
                        for answer in answers:
                            yield answer
            finally:
                if execution.returned and not execution.aborted:
                    self._quarantine.survived(self._code, execution.requests)

    def kill(self, reason: str) -> None:
        self._worker.kill(reason)

    async def check_ready(self) -> None:
        if self._checks_readiness:
            await self._worker.readiness.check()

    async def close(self) -> None:
        await self._worker.close()


class _ExecuteCall:
    """One call of `execute`: cancels its requests in the worker, also before they are sent."""

    __slots__ = ("_cancelled", "_executions", "_requests")

    def __init__(self, requests: Sequence[InferRequest], executions: WorkerExecutions) -> None:
        self._requests = requests
        self._executions = executions
        self._cancelled = False
        for request in requests:
            if (cancellation := request.cancellation) is not None:
                cancellation.subscribe(partial(self._cancel, request, cancellation), may_stop=True)

    def waited_for(self, indexes: Sequence[int]) -> Sequence[int]:
        """The indexes of requests whose clients have not disconnected."""
        if not self._cancelled:
            return indexes
        found = [(index, self._requests[index].cancellation) for index in indexes]
        return [index for index, each in found if each is None or not each.cancelled]

    def catch_up(self) -> None:
        """Close and cancel requests that ended before they were sent to the worker."""
        if not self._cancelled:
            return
        for request in self._requests:
            if (cancellation := request.cancellation) is not None:
                self._cancel(request, cancellation)

    def _cancel(self, request: InferRequest, cancellation: Cancellation) -> None:
        self._cancelled = True
        if cancellation.cancelled:
            self._executions.close_requests([request])
        elif cancellation.stopping:
            self._executions.stop(request)
