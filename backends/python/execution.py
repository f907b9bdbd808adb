"""One execution of a worker: its answers as they come, and which requests are still open."""

import asyncio
from collections.abc import Sequence

from gateway.backend import Answer, Note
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse


class Execution:
    """Requests that a worker was handed together; one task takes their answers.

    They are numbered from `first` on; `indexes` are how their answers are to be told. `weight` is
    how much waits for the task, `held` that its senders wait for that. It is `returned` once
    `execute` has, or never will.
    """

    __slots__ = (
        "_answers",
        "_first",
        "_freed",
        "_open",
        "_waiter",
        "held",
        "lost",
        "requests",
        "returned",
        "timer",
        "weight",
    )

    def __init__(
        self, requests: Sequence[InferRequest], first: int, indexes: Sequence[int]
    ) -> None:
        self.requests = requests
        self._first = first
        self._freed = False
        self.returned = False
        self.lost = False
        self.held = False
        self.timer: asyncio.TimerHandle | None = None
        self.weight = 0
        self._open = dict(enumerate(indexes, first))
        self._answers: list[Answer] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will come, and the worker could take another execution."""
        return self.returned and not self._open

    @property
    def numbers(self) -> range:
        """The numbers of its requests."""
        return range(self._first, self._first + len(self.requests))

    def request(self, number: int) -> InferRequest:
        """The request of that number."""
        return self.requests[number - self._first]

    @property
    def open(self) -> list[int]:
        """The numbers of the requests that are not done."""
        return list(self._open)

    async def answers(self) -> list[Answer]:
        """All answers that are there, at least one; none once it is over."""
        while not self._answers and not self.over:
            await self._change()
        answers, self._answers = self._answers, []
        return answers

    async def has_returned(self) -> None:
        """Wait until `execute` has returned, or the worker has ended."""
        while not self.returned:
            self._answers.clear()
            await self._change()

    # For the worker.

    def answer(self, number: int, answer: InferResponse | InferenceError, weight: int) -> bool:
        """An answer to an open request; returns whether that is done now."""
        self._answers.append((self._open[number], answer))
        self.weight += weight
        if isinstance(answer, InferenceError) or answer.final:
            del self._open[number]
            return True
        return False

    def reschedule(self, number: int) -> None:
        """An open request is to be executed once more."""
        self._answers.append((self._open.pop(number), Note.RESCHEDULED))

    def end(self) -> None:
        """`execute` has returned; requests that are still open are answered later."""
        self._return()
        if self._open:
            self.free()

    def free(self) -> None:
        """The worker may be handed another execution."""
        if not self._freed:
            self._freed = True
            self._answers.append((0, Note.FREED))

    def lose(self, error: InferenceError) -> None:
        """The worker has ended: so does every request that is not done."""
        self.lost = True
        self.fail(error)
        self._return()

    def fail(self, error: InferenceError) -> None:
        """End every request that is not done."""
        self._answers += [(index, error) for index in self._open.values()]
        self._open.clear()

    def leave(self, requests: Sequence[InferRequest]) -> list[int]:
        """Nobody waits for these any more; the numbers of those that were not done."""
        left = [n for n in self._open if any(self.request(n) is each for each in requests)]
        for number in left:
            del self._open[number]
        return left

    def abandon(self) -> None:
        """Nobody waits for any answer any more."""
        self._open.clear()
        self._answers.clear()

    def wake(self) -> None:
        """Have the task look at what has come."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _return(self) -> None:
        self.returned = True
        if self.timer is not None:
            self.timer.cancel()

    async def _change(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
