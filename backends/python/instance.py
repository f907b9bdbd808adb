"""One instance of a Python model: its worker, and what the scheduler hands it."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence

from prometheus_client.core import Metric

from backends.python.quarantine import Quarantine
from backends.python.running_worker import Worker
from gateway.backend import Answer, Instance
from gateway.messages import InferRequest


class _Ahead:
    """What happens to the requests of a call of `execute` before the worker has all of them."""

    __slots__ = ("left", "stopped")

    def __init__(self) -> None:
        self.left: list[InferRequest] = []
        self.stopped: list[InferRequest] = []


class PythonInstance(Instance):
    """Executes in one worker, one execution at a time.

    `code` tells the state of the model's files, for the quarantine; `checks_readiness` says
    whether the model has an `is_ready` of its own.
    """

    def __init__(
        self,
        worker: Worker,
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
        self._ahead: set[_Ahead] = set()

    @property
    def alive(self) -> bool:  # type: ignore[override]  # most need no property
        return self._worker.alive

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        plan = self._quarantine.plan(self._code, requests)
        for refused in plan.refused:
            yield refused
        ahead = _Ahead()
        self._ahead.add(ahead)
        try:
            for indexes in plan.groups:
                together = [requests[each] for each in indexes]
                execution = await self._executions.begin(together, indexes)
                try:
                    async with execution:
                        self._catch_up(ahead)
                        while answers := await execution.answers():
                            for answer in answers:
                                yield answer
                finally:
                    if execution.returned and not execution.lost:
                        self._quarantine.survived(self._code, execution.requests)
        finally:
            self._ahead.discard(ahead)

    def _catch_up(self, ahead: _Ahead) -> None:
        """Tell the worker what has happened to requests before it had them."""
        if ahead.left:
            self._executions.leave_some(ahead.left)
        for request in ahead.stopped:
            self._executions.stop(request)

    def kill(self, reason: str) -> None:
        self._worker.kill(reason)

    def left(self, requests: Sequence[InferRequest]) -> None:
        self._executions.leave_some(requests)
        for ahead in self._ahead:
            ahead.left += requests

    def waits_for(self, requests: Sequence[InferRequest]) -> Iterable[str]:
        return self._worker.services.waits_for()

    def stop(self, request: InferRequest) -> bool:
        self._executions.stop(request)
        for ahead in self._ahead:
            ahead.stopped.append(request)
        return True

    async def died(self) -> str:
        return await asyncio.shield(self._worker.died)

    async def check_ready(self) -> None:
        if self._checks_readiness:
            await self._worker.readiness.check()

    def metrics(self) -> Iterable[Metric]:
        return self._worker.services.shown()

    async def close(self) -> None:
        await self._worker.close()
