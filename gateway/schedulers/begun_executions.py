"""Executions without a task, and the end of executions."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial

from gateway.backend import Instance, SingleExecutions
from gateway.errors import InferenceError
from gateway.schedulers.execution import Execution


class BegunExecutions:
    """The executions of a scheduler that have no task; all have ended after `async with`."""

    def __init__(self) -> None:
        self.ends: dict[Execution, asyncio.Future[None] | None] = {}
        """The executions; their ends, where one is waited for."""

    def __iter__(self) -> Iterator[Execution]:
        return iter(tuple(self.ends))

    def begin(
        self, singles: SingleExecutions, execution: Execution, ended: Callable[[], None]
    ) -> None:
        """Begin an execution with one entry; `ended` is called at its end, maybe at once."""
        self.ends[execution] = None
        execution.begin(singles, partial(self._ended, execution, ended))

    def of(self, instance: Instance) -> dict[asyncio.Future[None], Execution]:
        """Those of an instance, by their ends."""
        return {self._end(each): each for each in self if each.instance is instance}

    def cancel(self) -> None:
        """Cancel all of them."""
        for execution in self:
            execution.cancel()

    async def __aenter__(self) -> None:
        """Nothing to do: they are begun one by one."""

    async def __aexit__(self, *_: object) -> None:
        """Wait for the ends of all of them."""
        await all_ended({self._end(each): each for each in self})

    def _end(self, execution: Execution) -> asyncio.Future[None]:
        end = self.ends[execution]
        if end is None:
            end = self.ends[execution] = asyncio.get_running_loop().create_future()
        return end

    def _ended(self, execution: Execution, ended: Callable[[], None]) -> None:
        end = self.ends.pop(execution)
        try:
            ended()
        finally:
            if end is not None:
                end.set_result(None)


def all_ended(
    executions: Mapping[asyncio.Future[None], Execution], error: InferenceError | None = None
) -> Awaitable[object]:
    """The end of executions, given by their ends; they continue if the wait for it is cancelled.

    With an error, the requests of those that have begun fail.
    """
    if error is not None:
        for execution in executions.values():
            if not execution.refuse():
                for entry in execution.entries:
                    entry.stream.abandon(error)
    return asyncio.shield(asyncio.gather(*executions, return_exceptions=True))
