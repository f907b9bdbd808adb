"""The end of a request in an engine that does not answer, and the stamps of one that does."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMError
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import RequestStateStats

from backends.vllm import engine_request
from backends.vllm.engine_request import EngineRequest, is_timed, merged, salted, stamps_of
from backends.vllm.queue_limits import QueueLimits
from gateway.messages import EngineStamps, InferRequest
from gateway.observability.receipt import Receipt
from gateway.processes.request_terms import TraceParent
from tests.builders import settle, soon

LIMIT_SECS = 0.05


class Engine:
    """An engine that takes a request; `abort` waits for `answers`, or fails."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.errored = False
        self.answers = asyncio.Event()
        self.aborted: list[str] = []
        self.ended = 0
        self.failure = failure
        self.output_processor: Any = None
        self.output: Any = SimpleNamespace(
            request_id="inside", get_nowait=lambda: None, get=asyncio.Event().wait
        )

    async def add_request(self, *_: Any, **__: Any) -> Any:
        return self.output

    async def abort(self, request_id: str, internal: bool = False) -> None:
        self.aborted.append(request_id)
        try:
            if self.failure is not None:
                raise self.failure
            await self.answers.wait()
        finally:
            self.ended += 1


async def request(engine: Engine, begun: asyncio.Event) -> None:
    """One that waits for its first output."""
    async with EngineRequest(engine, "outside", lambda _: None) as running:
        await running.submit("prompt", None)
        begun.set()
        await running.next()


async def left(engine: Engine) -> "asyncio.Task[None]":
    """A request whose task is cancelled."""
    begun = asyncio.Event()
    task = asyncio.create_task(request(engine, begun))
    await soon(begun.wait())
    await settle()
    task.cancel()
    return task


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_request, "ABORT_TIMEOUT_SECS", LIMIT_SECS)


async def test_a_cancelled_request_ends_though_the_engine_does_not_answer_its_abort() -> None:
    engine = Engine()
    task = await left(engine)
    await soon(asyncio.wait((task,)))
    assert task.cancelled()
    assert (engine.aborted, engine.ended) == (["inside"], 1)


async def test_a_cancellation_that_a_wait_before_has_lost_is_noticed() -> None:
    """As `asyncio.wait_for` loses one before Python 3.12, if what it waits for is ready."""
    engine = Engine()

    async def late(begun: asyncio.Event) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        await request(engine, begun)

    begun = asyncio.Event()
    task = asyncio.create_task(late(begun))
    await asyncio.sleep(0)
    task.cancel()
    await soon(asyncio.wait((task,)))
    assert task.cancelled()
    assert not begun.is_set()
    assert engine.aborted == []


async def test_an_abort_that_is_cancelled_again_leaves_no_task() -> None:
    engine = Engine()
    task = await left(engine)
    await settle()
    task.cancel()
    await soon(asyncio.wait((task,)))
    assert task.cancelled()
    assert (engine.aborted, engine.ended) == (["inside"], 1)


@pytest.mark.parametrize("failure", [VLLMError("dead"), LookupError("a defect")])
async def test_a_failed_abort_hides_only_what_the_engine_says(failure: Exception) -> None:
    engine = Engine(failure)
    task = await left(engine)
    await soon(asyncio.wait((task,)))
    if isinstance(failure, VLLMError):
        assert task.cancelled()
    else:
        assert task.exception() is failure


@pytest.mark.parametrize("errored", [False, True])
async def test_an_error_within_a_step_is_the_death_of_the_engine(errored: bool) -> None:
    """vLLM's client passes it to all requests of the engine, and ends."""
    engine, failure = Engine(), LookupError("a defect")

    async def fail() -> None:
        engine.errored = errored
        raise failure

    engine.output.get = fail
    engine.answers.set()
    with pytest.raises(EngineDeadError if errored else LookupError) as caught:
        await soon(request(engine, asyncio.Event()))
    assert failure in (caught.value, caught.value.__cause__)
    assert engine.aborted == ([] if errored else ["inside"])


def test_a_salt_differs_among_tenants_and_among_the_salts_of_one() -> None:
    prompts = ({"prompt": "x"}, {"prompt": "x", "cache_salt": "one"})
    found = [salted(prompt, tenant) for prompt in prompts for tenant in ("a", "b")]
    assert len({each["cache_salt"] for each in found}) == 4
    assert [each["prompt"] for each in found] == ["x"] * 4
    assert salted(dict(prompts[1]), "a") == found[2]
    assert "cache_salt" not in prompts[0]


def test_an_encoders_prompt_has_the_salt_in_that_of_its_decoder() -> None:
    found = salted({"type": "enc_dec", "decoder_prompt": {"prompt_token_ids": [1]}}, "a")
    assert found["decoder_prompt"].keys() == {"prompt_token_ids", "cache_salt"}


def statistics(queued: float, scheduled: float, first: float, last: float, put_back: int) -> Any:
    """Those of one sequence, as vLLM has them: in seconds."""
    return RequestStateStats(
        queued_ts=queued,
        scheduled_ts=scheduled,
        first_token_ts=first,
        last_token_ts=last,
        num_preemptions=put_back,
    )


FIRST, SECOND = statistics(1, 2, 3.5, 7, 1), statistics(1.5, 1.75, 4, 6, 2)


def test_the_stamps_of_several_sequences_are_the_earliest_starts_and_the_latest_token() -> None:
    found = stamps_of([FIRST, SECOND])
    secs = 10**9
    assert found == EngineStamps(secs, 7 * secs // 4, 7 * secs // 2, 7 * secs, 3)
    assert merged([stamps_of([FIRST]), stamps_of([SECOND])]) == found
    assert merged([stamps_of([FIRST]), None]) is None
    assert merged([]) is None
    unknown = EngineStamps(0, 2 * secs, 0, 7 * secs)
    assert merged([unknown, found]) == EngineStamps(secs, 7 * secs // 4, 7 * secs // 2, 7 * secs, 3)


def test_the_limit_of_a_queue_is_that_of_the_sequence_that_was_scheduled_first() -> None:
    limits = QueueLimits(8)
    for secs, running in ((0.5, 8), (1.9, 0)):
        limits.note(SimpleNamespace(num_running_reqs=running, kv_cache_usage=0.0), secs)
    assert stamps_of([FIRST], limits).limit == ""
    found = stamps_of([FIRST, SECOND], limits)
    assert found.limit == "max_num_seqs (8)"
    assert merged([stamps_of([FIRST], limits), found]).limit == found.limit


@pytest.mark.parametrize("count", [1, 2])
async def test_a_finished_request_has_the_stamps_of_its_sequences(count: int) -> None:
    """vLLM's last output has those of one of them."""
    engine = Engine()
    engine.output.get_nowait = lambda: SimpleNamespace(finished=True, outputs=[], metrics=FIRST)
    others = {"other": SimpleNamespace(queue=None, stats=SECOND)}
    own = {str(n): SimpleNamespace(queue=engine.output, stats=n) for n in (FIRST, SECOND)}
    engine.output_processor = SimpleNamespace(request_states={**others, **own})
    async with EngineRequest(engine, "outside", lambda _: None) as running:
        running.is_timed = True
        await running.submit("prompt", SimpleNamespace(n=count))
        assert running.stamps is None
        await running.next()
        assert running.stamps == stamps_of([FIRST, SECOND][:count])


async def test_a_request_of_an_engine_that_measures_nothing_has_no_stamps() -> None:
    engine = Engine()
    engine.output.get_nowait = lambda: SimpleNamespace(finished=True, outputs=[], metrics=None)
    async with EngineRequest(engine, "outside", lambda _: None) as running:
        running.is_timed = True
        await running.submit("prompt", None)
        await running.next()
        assert running.stamps is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, False), ({"receipt": Receipt(1, 1)}, True), ({"trace": TraceParent("")}, True)],
    ids=["plain", "receipt", "trace"],
)
async def test_a_request_has_stamps_if_something_reads_them(
    fields: dict[str, Any], expected: bool
) -> None:
    engine = Engine()
    engine.output.get_nowait = lambda: SimpleNamespace(finished=True, outputs=[], metrics=FIRST)
    async with EngineRequest(engine, "outside", lambda _: None) as running:
        running.is_timed = is_timed(InferRequest(model="m", **fields))
        await running.submit("prompt", None)
        await running.next()
        assert (running.stamps is not None) is expected
