"""One execution of a worker: its answers as they come, and which requests are still open."""

import asyncio
from collections.abc import Sequence

from gateway.backend import Answer, Note
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse


class Execution:
    """Requests that a worker was handed together; one task takes their answers.

    With `before`, an execution that the worker was handed earlier and that is not over, answers
    are only given once those of that one have been taken; `behind` is who waits for this one.

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
        "before",
        "behind",
        "held",
        "lost",
        "requests",
        "returned",
        "timer",
        "weight",
    )

    def __init__(
        self,
        requests: Sequence[InferRequest],
        first: int,
        indexes: Sequence[int],
        before: "Execution | None" = None,
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
        self.behind: Execution | None = None
        self.before = before
        if before is not None:
            before.behind = self

    @property
    def settled(self) -> bool:
        """Whether it is over, and all its answers have been taken."""
        return self.over and not self._answers

    @property
    def untaken(self) -> bool:
        """Whether answers are there to be taken."""
        return bool(self._answers)

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
        while self._must_wait or not (self._answers or self.over):
            await self._change()
        answers, self._answers = self._answers, []
        self._let_others()
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
        self._let_others()

    def wake(self) -> None:
        """Have the task look at what has come."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _return(self) -> None:
        self.returned = True
        if self.timer is not None:
            self.timer.cancel()

    @property
    def _must_wait(self) -> bool:
        before = self.before
        while before is not None and not before.untaken:
            before = before.before
        return before is not None

    def _let_others(self) -> None:
        """Nothing of this one is there to be taken: those behind it need wait for it no longer."""
        other = self.behind
        while other is not None:
            other.wake()
            other = other.behind
        if self.over or not self._open:
            self._unlink()

    def _unlink(self) -> None:
        before, behind = self.before, self.behind
        if before is not None:
            before.behind = behind
        if behind is not None:
            behind.before = before
        self.before = self.behind = None

    async def _change(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
