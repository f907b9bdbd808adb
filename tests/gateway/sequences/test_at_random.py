"""Sequences of clients that connect, wait, fail and disconnect at random, and a model of them.

The model: the answer to a request is the sum of what its sequence has sent since its START, less
what has failed; so a request that is lost, doubled or mixed up with another one's shows.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence

import pytest

from gateway.backend import Answer, Instance, Note
from gateway.config import InstanceGroup, Resource
from gateway.config import RateLimiter as Limits
from gateway.config.data_type import DataType
from gateway.config.scheduling import State
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.schedulers.execution import Entry
from gateway.schedulers.rate_limiter import ExecutionLimiter
from gateway.tensor import Datatype, array_tensor
from tests.gateway.conftest import Start
from tests.gateway.schedulers.queues import Queue
from tests.gateway.sequences.parts import direct, oldest, part

SUM = State(input_name="sum_in", output_name="sum_out", data_type=DataType.TYPE_INT64, dims=(1,))
BAD = InferenceError(Code.INVALID_ARG, "bad")
WAIT_SECS = 20
IDLE_US = 10_000
TIMEOUT_US = 500
CONFIGS = {
    "direct": direct(3, max_sequence_idle_microseconds=IDLE_US, state=(SUM,)),
    "direct, with a delay": direct(
        3, delay_us=200, utilization=1.0, max_sequence_idle_microseconds=IDLE_US, state=(SUM,)
    ),
    "oldest": oldest(3, 2, max_sequence_idle_microseconds=IDLE_US, state=(SUM,)),
    "oldest, with a delay": oldest(
        4,
        3,
        preferred_batch_size=(2,),
        max_queue_delay_microseconds=200,
        max_sequence_idle_microseconds=IDLE_US,
        state=(SUM,),
    ),
    "oldest, in order": oldest(
        3, 2, preserve_ordering=True, max_sequence_idle_microseconds=IDLE_US, state=(SUM,)
    ),
    "soon idle": direct(2, max_sequence_idle_microseconds=300, state=(SUM,)),
}
TURNS = InstanceGroup(rate_limiter=Limits(resources=(Resource(name="it", count=1),)))


class Adding(Instance):
    """Adds what it is sent to the state; fails, frees itself early and takes its time at random."""

    def __init__(self, choice: random.Random) -> None:
        self._choice = choice
        self._executing: set[object] = set()

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        ids = [r.sequence.correlation_id for r in requests if r.sequence]
        real = [each for each in ids if each]
        assert len(real) == len(set(real))
        assert not self._executing.intersection(real)
        self._executing.update(real)
        try:
            await self._pause()
            if self._choice.random() < 0.05:
                raise BAD
            for index, request in self._shuffled(requests):
                await self._pause()
                yield index, self._answer(request)
            if self._choice.random() < 0.2:
                self._executing.difference_update(real)
                real.clear()
                yield 0, Note.FREED
                await self._pause()
        finally:
            self._executing.difference_update(real)

    def _shuffled(self, requests: Sequence[InferRequest]) -> list[tuple[int, InferRequest]]:
        return self._choice.sample(list(enumerate(requests)), len(requests))

    def _answer(self, request: InferRequest) -> InferResponse | InferenceError:
        if self._choice.random() < 0.05:
            return BAD
        text, before = request.input("text_input"), request.input("sum_in")
        assert text is not None
        assert before is not None
        total = before.array() + int(text.elements()[0])
        named = {"text_output": total, "sum_out": total}
        outputs = tuple(array_tensor(n, Datatype.INT64, values) for n, values in named.items())
        return InferResponse(outputs=outputs, final=True)

    async def _pause(self) -> None:
        for _ in range(self._choice.choice([0, 0, 1, 3])):
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Nothing to release."""


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
async def test_every_answer_is_the_sum_of_its_own_sequence(
    start: Start, kind: str, seed: int, limited: bool
) -> None:
    choice = random.Random(seed)
    queue = start(CONFIGS[kind], ExecutionLimiter() if limited else None)
    served = asyncio.Event()
    changing = asyncio.create_task(_change_instances(queue, choice, served))
    clients = [_client(queue, choice, number) for number in range(30)]
    async with asyncio.timeout(WAIT_SECS):
        outcomes = [each for found in await asyncio.gather(*clients) for each in found]
        served.set()
        await changing
    assert {"answered"} < set(outcomes)


async def _change_instances(queue: Queue, choice: random.Random, served: asyncio.Event) -> None:
    """Instances die and are withdrawn; at the end all are, so that no slot is left taken."""
    group = TURNS if queue.limiter else InstanceGroup()
    present: list[Instance] = []
    while not served.is_set():
        while len(present) < 2:
            present.append(Adding(choice))
            queue.add(present[-1], group)
        for _ in range(choice.randint(20, 200)):
            await asyncio.sleep(0)
        leaving = present.pop(0)
        if choice.random() < 0.5:
            queue.scheduler.remove(leaving, InferenceError(Code.UNAVAILABLE, "died"))
        else:
            present.append(Adding(choice))
            queue.add(present[-1], group)
            await queue.scheduler.remove(leaving)
    for instance in present:
        await queue.scheduler.remove(instance)


async def _client(queue: Queue, choice: random.Random, number: int) -> list[str]:
    outcomes = []
    for turn in range(6):
        name = f"{number}/{turn}" if number % 2 else 100 * (number + 1) + turn
        outcomes += await _sequence(queue, choice, name)
    return outcomes


async def _sequence(queue: Queue, choice: random.Random, name: int | str) -> list[str]:
    """A few requests one by one, or several at a time; most are ended, some clients leave."""
    length = choice.randint(1, 8)
    flags = ["start", *[""] * (length - 1)]
    if choice.random() < 0.9:
        flags[-1] += " end"
    talk = Talk(choice)
    for flag in flags:
        value = choice.randint(1, 1000)
        timeout_us = TIMEOUT_US if choice.random() < 0.1 else 0
        request = part(name, str(value), flag, timeout_us=timeout_us)
        try:
            talk.waiting.append((value, queue.ask(request)))
        except InferenceError:
            talk.outcomes.append("refused")
            break
        if choice.random() < 0.5:
            await talk.settle()
        if talk.over:
            break
    await talk.settle()
    return talk.outcomes


class Talk:
    """One sequence as its client sees it; over once an error may have ended it, or the client."""

    def __init__(self, choice: random.Random) -> None:
        self.waiting: list[tuple[int, Entry]] = []
        self.outcomes: list[str] = []
        self.over = False
        self._choice = choice
        self._total = 0

    async def settle(self) -> None:
        """Leave, or read every answer."""
        waiting, self.waiting = self.waiting, []
        if self._choice.random() < 0.1:
            await self._leave([entry for _, entry in waiting])
        for value, entry in waiting:
            await self._read(value, entry)

    async def _leave(self, entries: list[Entry]) -> None:
        for _ in range(self._choice.randint(0, 4)):
            await asyncio.sleep(0)
        for entry in self._choice.sample(entries, len(entries)):
            entry.stream.cancel()
        self.over = True

    async def _read(self, value: int, entry: Entry) -> None:
        try:
            with entry.stream:
                answer = await entry.stream.only()
        except InferenceError as error:
            self.outcomes.append(error.message)
            self.over = self.over or error is not BAD
        else:
            self.outcomes.append("answered")
            self._total += value
            assert self.over or answer.outputs[0].array().item() == self._total
