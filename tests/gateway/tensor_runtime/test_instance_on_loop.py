"""Short runs on the event loop, in executions and in singles."""

import asyncio
import threading
import time
from contextlib import AsyncExitStack, aclosing
from itertools import pairwise

import numpy as np
import pytest

from gateway.backend import Note
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.tensor_runtime import instance
from gateway.tensor_runtime.instance import HOLD_NS, TRIALS
from tests.builders import TEXT, WAIT_SECS, soon
from tests.gateway.conftest import Start
from tests.gateway.tensor_runtime.test_instance import (
    Runtime,
    answers,
    closing,
    request,
    values,
)

MOST_OF_TURN = 1 + HOLD_NS // 50_000
"""Executions of 50 us that fit into one turn of the loop."""
SHORT_NS = 20_000_000
LONG_SECS = 0.05


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the limit of short runs: on a busy machine each may take a hundred times as long."""
    monkeypatch.setattr(instance, "LIMIT_NS", SHORT_NS)


class Steady(Runtime):
    steady = True


async def repeated(runtime: Runtime, times: int) -> None:
    for number in range(times):
        (answer,) = await answers(runtime, request(number))
        assert values(answer)["Y"] == [number]


async def test_short_runs_of_a_steady_model_move_to_the_loop() -> None:
    async with closing(Steady()) as runtime:
        await repeated(runtime, 12)
    assert runtime.threads[:TRIALS] == ["runtime"] * TRIALS
    assert runtime.threads[TRIALS:] == ["MainThread"] * (12 - TRIALS)
    assert runtime.released_on == "runtime"


async def test_runs_of_others_stay_on_the_thread() -> None:
    async with closing(Runtime()) as runtime:
        await repeated(runtime, 12)
    assert set(runtime.threads) == {"runtime"}


async def test_long_runs_of_a_steady_model_stay_on_the_thread() -> None:
    def take_a_while(x: np.ndarray) -> np.ndarray:
        threading.Event().wait(LONG_SECS)
        return x

    async with closing(Steady(take_a_while)) as runtime:
        await repeated(runtime, 12)
    assert set(runtime.threads) == {"runtime"}


async def test_failures_show_nothing_about_how_long_runs_take() -> None:
    def fail(x: np.ndarray) -> np.ndarray:
        raise InferenceError(Code.INTERNAL, "at once")

    async with closing(Steady(fail)) as runtime:
        for _ in range(12):
            with pytest.raises(InferenceError):
                await answers(runtime, request(1))
    assert set(runtime.threads) == {"runtime"}


def refuse_negative(x: np.ndarray) -> np.ndarray:
    if (x < 0).any():
        raise InferenceError(Code.INTERNAL, "negative")
    return x


async def test_a_failure_on_the_loop_is_reported_like_any_other() -> None:
    async with closing(Steady(refuse_negative)) as runtime:
        await repeated(runtime, 10)
        with pytest.raises(InferenceError, match="negative"):
            await answers(runtime, request(-1))
        await repeated(runtime, 1)
    assert runtime.threads[-2:] == ["MainThread"] * 2


async def test_nothing_runs_on_the_loop_during_a_cancelled_run() -> None:
    began, gate = threading.Event(), threading.Event()

    def hold_large(x: np.ndarray) -> np.ndarray:
        if len(x) > 1:
            began.set()
            gate.wait(WAIT_SECS)
        return x

    async with closing(Steady(hold_large)) as runtime:
        await repeated(runtime, 10)
        task = asyncio.create_task(answers(runtime, request(1, 2)))
        await asyncio.to_thread(began.wait, WAIT_SECS)
        task.cancel()
        await soon(asyncio.wait([task]))
        assert not runtime.accepts(request(7))
        next_one = asyncio.create_task(answers(runtime, request(7)))
        await asyncio.sleep(0)
        gate.set()
        assert values((await soon(next_one))[0])["Y"] == [7]
        await repeated(runtime, 1)
    assert runtime.threads[-3:] == ["runtime", "runtime", "MainThread"]


def compute_for_50_us(x: np.ndarray) -> np.ndarray:
    until = time.thread_time_ns() + 50_000
    while time.thread_time_ns() < until:
        pass
    return x


async def test_a_backlog_of_short_executions_yields_to_the_loop() -> None:
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(turn)

    async with closing(Steady(compute_for_50_us)) as runtime:
        await repeated(runtime, TRIALS)
        turn()
        for number in range(60):
            async with aclosing(runtime.execute([request(number)])) as found:
                assert len([answer async for answer in found]) == 1
    assert runtime.threads[TRIALS:] == ["MainThread"] * 60
    assert turns >= 6


# Singles.


class Notes:
    """The reader of a single request."""

    def __init__(self) -> None:
        self.answers: list[InferResponse | InferenceError | Note] = []
        self.errors: list[Exception | None] = []

    def take(self, answer: InferResponse | InferenceError | Note) -> None:
        assert self.errors == []
        self.answers.append(answer)

    def over(self, error: Exception | None) -> None:
        self.errors.append(error)


def begin(runtime: Runtime, asked: InferRequest) -> Notes:
    """Begin a request that has to be accepted."""
    notes = Notes()
    assert runtime.singles is not None
    assert runtime.singles.accepts(asked)
    runtime.singles.begin(asked, notes).abandon()
    return notes


async def test_an_instance_has_singles_while_it_executes_on_the_loop() -> None:
    async with closing(Steady()) as runtime:
        await repeated(runtime, TRIALS)
        assert runtime.singles is None
        await repeated(runtime, 1)
        assert runtime.singles is runtime
        await answers(runtime, request(*range(64)))
        assert runtime.singles is None


async def test_a_single_is_executed_at_once_after_the_trials() -> None:
    async with closing(Steady()) as runtime:
        for number in range(TRIALS):
            assert not runtime.accepts(request(number))
            await repeated(runtime, 1)
        await repeated(runtime, 1)
        notes = begin(runtime, request(7))
        (answer,) = notes.answers
        assert isinstance(answer, InferResponse)
        assert answer.final
        assert values((0, answer))["Y"] == [7]
        assert notes.errors == [None]
        assert not runtime.accepts(request(*range(64))), "that many rows have had no trial"


async def test_the_failure_of_a_single_is_raised() -> None:
    async with closing(Steady(refuse_negative)) as runtime:
        await repeated(runtime, TRIALS + 1)
        with pytest.raises(InferenceError, match="negative"):
            begin(runtime, request(-1))
        assert begin(runtime, request(1)).errors == [None]


async def test_the_time_of_a_failure_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = list[int]()
    monkeypatch.setattr(instance.TURN, "spend", spent.append)

    async with closing(Steady(refuse_negative)) as runtime:
        await repeated(runtime, TRIALS + 1)
        with pytest.raises(InferenceError, match="negative"):
            await answers(runtime, request(-1))
        with pytest.raises(InferenceError, match="negative"):
            begin(runtime, request(-1))
    assert len(spent) == 3
    assert all(spent)


async def test_a_backlog_of_singles_yields_to_the_loop() -> None:
    async with closing(Steady(compute_for_50_us)) as runtime:
        await repeated(runtime, TRIALS + 1)
        await asyncio.sleep(0)
        accepted = []
        for _ in range(MOST_OF_TURN + 1):
            accepted.append(runtime.accepts(request(1)))
            if accepted[-1]:
                begin(runtime, request(1))
        assert (accepted[0], accepted[-1]) == (True, False)
        await asyncio.sleep(0)
        assert runtime.accepts(request(1))
    assert runtime.singles is None


@pytest.mark.parametrize("instances", [1, 4])
async def test_a_turn_of_the_loop_has_one_limit_for_all_instances(
    start: Start, instances: int
) -> None:
    queue = start(TEXT)
    async with AsyncExitStack() as stack:
        runtimes = [Steady(compute_for_50_us) for _ in range(instances)]
        for runtime in runtimes:
            await stack.enter_async_context(closing(runtime))
            await repeated(runtime, TRIALS + 1)
            queue.add(runtime)
        before = sum(len(each.batches) for each in runtimes)
        found = [before]
        entries = [queue.ask(request(1)) for _ in range(200)]
        while found[-1] < before + len(entries):
            found.append(sum(len(each.batches) for each in runtimes))
            await asyncio.sleep(0)
        for entry in entries:
            await soon(entry.stream.batch())
        await queue.stop()
    assert max(b - a for a, b in pairwise(found)) <= MOST_OF_TURN + instances
