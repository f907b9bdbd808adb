"""One instance of a Python model: its worker, and what the scheduler hands it."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence

from prometheus_client.core import Metric

from backends.python.execution import Execution
from backends.python.parameters import Parameters
from backends.python.quarantine import Quarantine
from backends.python.running_worker import Worker
from gateway.backend import Answer, Instance
from gateway.messages import InferRequest


class PythonInstance(Instance):
    """Executes in one worker, one execution at a time.

    `code` tells the state of the model's files, for the quarantine; `checks_readiness` says
    whether the model has an `is_ready` of its own.
    """

    def __init__(
        self,
        worker: Worker,
        parameters: Parameters,
        quarantine: Quarantine,
        code: bytes,
        *,
        checks_readiness: bool,
    ) -> None:
        self._worker = worker
        self._executions = worker.executions
        self._parameters = parameters
        self._quarantine = quarantine
        self._code = code
        self._checks_readiness = checks_readiness

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        plan = self._quarantine.plan(self._code, requests)
        for refused in plan.refused:
            yield refused
        for indexes in plan.groups:
            execution = await self._begin([requests[index] for index in indexes], indexes)
            try:
                while answers := await execution.answers():
                    self._executions.taken(execution)
                    for answer in answers:
                        yield answer
            finally:
                await self._leave(execution)

    def left(self, requests: Sequence[InferRequest]) -> None:
        self._worker.leave_some(requests)

    async def died(self) -> str:
        return await asyncio.shield(self._worker.died)

    async def check_ready(self) -> None:
        if self._checks_readiness:
            await self._worker.readiness.check()

    def metrics(self) -> Iterable[Metric]:
        return self._worker.services.shown()

    async def close(self) -> None:
        await self._worker.close()

    async def _begin(self, requests: Sequence[InferRequest], indexes: Sequence[int]) -> Execution:
        execution = await self._executions.begin(requests, indexes)
        if limit := self._parameters.execute_timeout_secs:
            why = f"its execute took longer than {limit:g} s (execute_timeout_secs)"
            loop = asyncio.get_running_loop()
            execution.timer = loop.call_later(limit, self._worker.kill, why)
        return execution

    async def _leave(self, execution: Execution) -> None:
        """Nobody waits for what is left of it; the worker is busy until `execute` returns."""
        if not execution.over:
            self._worker.leave(execution)
            await self._wait_abandoned(execution)
        if not execution.lost:
            self._quarantine.survived(self._code, execution.requests)

    async def _wait_abandoned(self, execution: Execution) -> None:
        limit = self._parameters.abandoned_execute_secs
        while not await self._has_returned(execution, limit):
            # What only lies behind another one in the worker is not to blame.
            if self._executions.is_first(execution):
                self._worker.kill(
                    f"its execute did not return within {limit:g} s once nobody waited for it "
                    "(abandoned_execute_secs)"
                )
                limit = 0

    @staticmethod
    async def _has_returned(execution: Execution, within_secs: float) -> bool:
        try:
            async with asyncio.timeout(within_secs or None):
                await execution.has_returned()
        except TimeoutError:
            return False
        return True
