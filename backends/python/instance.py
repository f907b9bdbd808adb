"""One instance of a Python model."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence

from prometheus_client.core import Metric

from backends.python.quarantine import Quarantine
from backends.python.running_worker import RunningWorker
from gateway.backend import Answer, Instance
from gateway.messages import InferRequest


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
        self._worker = worker
        self._executions = worker.executions
        self._quarantine = quarantine
        self._code = code
        self._checks_readiness = checks_readiness
        self._calls: set[_ExecuteCall] = set()

    @property
    def alive(self) -> bool:  # type: ignore[override]  # most need no property
        return self._worker.alive

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        plan = self._quarantine.plan(self._code, requests)
        call = _ExecuteCall(requests)
        self._calls.add(call)
        try:
            for refused in plan.refused:
                yield refused
            for group in plan.groups:
                if not (indexes := call.waited_for(group)):
                    continue
                execution = await self._executions.begin([requests[i] for i in indexes], indexes)
                try:
                    async with execution:
                        self._catch_up(call)
                        while answers := await execution.answers():
                            for answer in answers:
                                yield answer
                finally:
                    if execution.returned and not execution.aborted:
                        self._quarantine.survived(self._code, execution.requests)
        finally:
            self._calls.remove(call)

    def _catch_up(self, call: "_ExecuteCall") -> None:
        """Close and cancel requests that ended before they were sent to the worker."""
        if call.closed:
            self._executions.close_requests(tuple(call.closed.values()))
        for request in call.stopped.values():
            self._executions.stop(request)

    def kill(self, reason: str) -> None:
        self._worker.kill(reason)

    def left(self, requests: Sequence[InferRequest]) -> None:
        for call in self._calls:
            call.closed |= call.own(requests)
        self._executions.close_requests(requests)

    def waits_for(self, requests: Sequence[InferRequest]) -> Iterable[str]:
        return self._worker.services.waits_for()

    def stop(self, request: InferRequest) -> bool:
        for call in self._calls:
            call.stopped |= call.own([request])
        self._executions.stop(request)
        return True

    async def died(self) -> str:
        return await asyncio.shield(self._worker.died)

    async def check_ready(self) -> None:
        if self._checks_readiness:
            await self._worker.readiness.check()

    def metrics(self) -> Iterable[Metric]:
        return self._worker.services.metrics()

    async def close(self) -> None:
        await self._worker.close()


class _ExecuteCall:
    """One call of `execute`: its requests, and by their `id` the closed and stopped ones."""

    __slots__ = ("_requests", "closed", "stopped")

    def __init__(self, requests: Sequence[InferRequest]) -> None:
        self._requests = requests
        self.closed: dict[int, InferRequest] = {}
        self.stopped: dict[int, InferRequest] = {}

    def own(self, requests: Sequence[InferRequest]) -> dict[int, InferRequest]:
        """The requests of this call among these, by `id`."""
        return {id(each): each for each in requests if any(each is own for own in self._requests)}

    def waited_for(self, indexes: Sequence[int]) -> Sequence[int]:
        """The indexes of requests whose clients have not disconnected."""
        if not self.closed:
            return indexes
        return [index for index in indexes if id(self._requests[index]) not in self.closed]
