"""The loop of the engine, with a stand-in for the engine and for the requests."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from sluice_llm import running as running_requests

from backends.openvino_genai.worker.sluice_openvino_genai import loop as loops
from backends.openvino_genai.worker.sluice_openvino_genai.loop import GenerationLoop

WAIT_SECS = 20


class Engine:
    """Has work for a number of steps; fails in a step if it is broken."""

    def __init__(self, steps: int, *, broken: bool = False) -> None:
        self.left, self.taken, self._broken = steps, 0, broken

    def has_non_finished_requests(self) -> bool:
        return self.left > 0

    def step(self) -> None:
        if self._broken:
            raise RuntimeError("unknown state")
        self.left, self.taken = self.left - 1, self.taken + 1

    def get_metrics(self) -> None:
        """Nothing is measured."""


class Sender:
    """Has room until a test holds it."""

    def __init__(self) -> None:
        self.freed = asyncio.Event()
        self.freed.set()
        self.cancelled = False
        self.errors: list[str] = []

    def is_held(self) -> bool:
        return not self.freed.is_set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    async def room(self) -> None:
        await self.freed.wait()


class Running:
    """A request whose text is read once per step."""

    def __init__(self, engine: Engine, steps: int) -> None:
        self.sender = Sender()
        self.read: list[int] = []
        self.cancelled = False
        self.prompt_tokens, self.tokens = 1, steps
        self.open_sequences, self.begun_at = 1, -1
        self._engine, self._steps = engine, steps

    def begin(self) -> None:
        self.begun_at = self._engine.taken

    def deliver(self) -> bool:
        self.read.append(self._engine.taken)
        return self._engine.taken >= self._steps

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has read all its messages."""

    @contextmanager
    def gathered() -> Iterator[None]:
        yield

    state = SimpleNamespace(
        work=SimpleNamespace(drained=True), connection=SimpleNamespace(gathered=gathered)
    )
    monkeypatch.setattr(loops, "worker", lambda: state)
    monkeypatch.setattr(loops, "fail", lambda sender, error: sender.errors.append(str(error)))


@asynccontextmanager
async def serving(
    engine: Engine, running: list[Running], most: int = 256
) -> AsyncIterator[list[int]]:
    """A loop that has taken in these; the tokens of those that have ended."""
    ended: list[int] = []
    gauges = SimpleNamespace(show=lambda *_: None)
    lengths = SimpleNamespace(finished=lambda _, tokens: ended.append(tokens))
    loop = GenerationLoop(engine, gauges, lengths, most)  # type: ignore[arg-type]
    for each in running:
        loop.add(each)  # type: ignore[arg-type]
    task = asyncio.create_task(loop.run(lambda _: None))
    try:
        yield ended
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_SECS):
        while not condition():  # noqa: ASYNC110 - of stand-ins
            await asyncio.sleep(0)


async def test_every_request_is_read_after_each_step() -> None:
    engine = Engine(3)
    running = [Running(engine, 3), Running(engine, 2)]
    async with serving(engine, running) as ended:
        await until(lambda: len(ended) == 2)
    assert [each.read for each in running] == [[1, 2, 3], [1, 2]]


async def test_a_slow_reader_is_not_read_until_it_has_caught_up() -> None:
    engine = Engine(3)
    slow, other = Running(engine, 3), Running(engine, 3)
    slow.sender.freed.clear()
    async with serving(engine, [slow, other]) as ended:
        await until(lambda: ended == [3])
        assert (slow.read, other.read) == ([], [1, 2, 3])
        slow.sender.freed.set()
        await until(lambda: len(ended) == 2)
    assert slow.read == [3]


async def test_a_sequence_that_a_delivery_begins_is_computed() -> None:
    engine = Engine(1)
    running = Running(engine, 2)
    running.sender.freed.clear()

    def deliver() -> bool:
        running.read.append(engine.taken)
        engine.left = 2 - engine.taken
        return engine.taken == 2

    running.deliver = deliver  # type: ignore[method-assign]
    async with serving(engine, [running]) as ended:
        await until(lambda: engine.taken == 1)
        await asyncio.sleep(0.01)  # the loop waits
        running.sender.freed.set()
        await until(lambda: ended == [2])
    assert running.read == [1, 2]


async def test_a_cancelled_request_leaves_the_engine_before_the_next_step() -> None:
    engine = Engine(1000)
    gone, other = Running(engine, 1000), Running(engine, 1000)
    async with serving(engine, [gone, other]):
        await until(lambda: engine.taken > 2)
        gone.sender.cancelled = True
        taken = engine.taken
        await until(lambda: engine.taken > taken + 2)
        assert (gone.cancelled, other.cancelled) == (True, False)
        assert gone.read[-1] <= taken
        assert gone.sender.errors == ["Request cancelled by client"]


async def test_requests_beyond_the_limit_wait_in_their_order() -> None:
    engine = Engine(4)
    running = [Running(engine, 2), Running(engine, 3), Running(engine, 4)]
    async with serving(engine, running, most=2) as ended:
        await until(lambda: len(ended) == 3)
    assert [each.begun_at for each in running] == [0, 0, 2]


async def test_a_request_of_more_sequences_than_the_limit_runs_alone() -> None:
    engine = Engine(4)
    running = [Running(engine, 1), Running(engine, 3), Running(engine, 4)]
    running[1].open_sequences = 5
    async with serving(engine, running, most=2) as ended:
        await until(lambda: len(ended) == 3)
    assert [each.begun_at for each in running] == [0, 1, 3]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RecursionError("maximum recursion depth"), "INVALID_ARG", "it is nested too deeply"),
        (ValueError("of the program"), "INTERNAL", "the model's program failed"),
    ],
)
def test_a_value_that_is_nested_too_deeply_is_the_clients_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: str, text: str
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(running_requests, "fail", lambda _, refusal: found.append(refusal))
    logger = SimpleNamespace(log_error=lambda _: None)
    monkeypatch.setattr(running_requests.pb_utils, "Logger", logger)
    with running_requests.answering(Sender()):
        raise error
    (refusal,) = found
    assert refusal.code == code
    assert text in str(refusal)


async def test_a_request_that_waits_can_be_cancelled() -> None:
    engine = Engine(1000)
    running = [Running(engine, 1000), Running(engine, 1000)]
    async with serving(engine, running, most=1):
        await until(lambda: engine.taken > 2)
        running[1].sender.cancelled = True
        await until(lambda: running[1].sender.errors == ["Request cancelled by client"])
    assert (running[1].begun_at, running[0].cancelled) == (-1, False)


async def test_an_exception_of_a_step_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def end(error: BaseException) -> None:
        ended.append(str(error))
        raise asyncio.CancelledError

    monkeypatch.setattr(loops, "end", end)
    engine = Engine(1, broken=True)
    async with serving(engine, [Running(engine, 1)]):
        await until(lambda: bool(ended))
    assert ended == ["unknown state"]
