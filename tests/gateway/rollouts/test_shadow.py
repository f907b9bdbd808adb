"""Shadow traffic: which requests are copied, when, and what becomes of the copies."""

import mmap
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, RequestedOutput, SequenceTag, SharedRegion
from gateway.models.model import Model
from gateway.rollouts.comparison import MOST_BYTES
from gateway.rollouts.evidence import Evidence
from gateway.rollouts.guardrails import read_guardrails
from gateway.rollouts.shadow import IN_FLIGHT, CopyOutcome, Shadow
from gateway.stream import ResponseStream
from gateway.tensor import Datatype, Tensor
from gateway.threads import LARGE_BYTES, Threads
from tests.builders import (
    TEXT,
    ScriptedInstance,
    read_all,
    settle,
    soon,
    text_request,
    text_response,
)
from tests.conftest import Serve

BROKEN = InferenceError(Code.INTERNAL, "broken")


class Pair:
    """Two versions of a model, and a shadow that copies each request."""

    def __init__(self, serve: Serve, most_in_flight: int = 8, **options: Any) -> None:
        self.instances = ScriptedInstance(), ScriptedInstance()
        config = replace(TEXT, **options)
        self.stable, self.candidate = (serve(each, config=config) for each in self.instances)
        self.evidence = Evidence(
            read_guardrails({"errors": {}, "differs": {"max": 0.1}}, "guardrails")
        )
        self.threads = Threads("comparisons", 1)
        self.shadow = Shadow(
            *(self.stable, self.candidate, self.evidence, self.threads, most_in_flight)
        )
        self.shadow.share = 1.0

    def infer(self, request: InferRequest | None = None) -> ResponseStream:
        """A request to stable."""
        asked = request or text_request()
        return self.stable.submit(asked, tap=self.shadow.tap(asked))

    async def ask(self, answer: str, copied: str | InferenceError) -> None:
        """A request to stable and its copy, with these answers."""
        with self.infer() as stream:
            (await self.instances[0].begun()).finish(answer)
            assert await soon(read_all(stream)) == [answer]
        copy = await self.instances[1].begun()
        if isinstance(copied, str):
            copy.finish(copied)
        else:
            copy.crash(copied)
        await soon(self.candidate.requests.drained())


@pytest.fixture
async def pair(serve: Serve) -> AsyncIterator[Pair]:
    pair = Pair(serve)
    yield pair
    pair.threads.close()


def counted(model: Model) -> tuple[int, ...]:
    """The statistics that the protocol shows."""
    found = model.statistics
    return (
        found.success.count,
        found.fail.count,
        found.inference_count,
        found.execution_count,
        found.pending,
        found.first_response_ms.counts[0],
        len(found.batches),
    )


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [("hi", CopyOutcome.EQUAL), ("ho", CopyOutcome.DIFFERENT), (BROKEN, CopyOutcome.FAILED)],
    ids=["equal", "different", "failed"],
)
async def test_an_answer_of_the_candidate_is_compared_and_counts_in_no_statistics(
    pair: Pair, answer: str | InferenceError, outcome: CopyOutcome
) -> None:
    await pair.ask("hi", answer)
    assert pair.shadow.outcomes == {outcome: 1}
    assert counted(pair.candidate) == (0,) * 7
    assert counted(pair.stable)[:4] == (1, 0, 1, 1)
    assert pair.instances[1].asked == ["hello"]
    assert pair.evidence.ended == [1, 0, 1]


@pytest.mark.parametrize(("copied", "breaches"), [("x", ["differs"]), ("y", [])])
async def test_large_answers_are_compared_in_a_thread_and_their_block_waits_for_that(
    serve: Serve, copied: str, breaches: list[str]
) -> None:
    pair, free = Pair(serve, most_in_flight=25), threading.Event()
    blocker = pair.threads.start(free.wait)
    for _ in range(25):
        await pair.ask("y" * LARGE_BYTES, copied * LARGE_BYTES)
    now = time.perf_counter_ns() + 2_000_000_000
    assert (pair.shadow.outcomes, pair.evidence.judge(now)) == ({}, [])
    free.set()
    await soon(blocker)
    await soon(pair.threads.run(int))
    await settle()
    outcome = CopyOutcome.DIFFERENT if breaches else CopyOutcome.EQUAL
    assert pair.shadow.outcomes == {outcome: 25}
    assert [each.guardrail for each in pair.evidence.judge(now)] == breaches
    pair.threads.close()


async def test_a_shadow_that_is_closed_drops_its_comparisons(pair: Pair) -> None:
    free = threading.Event()
    blocker = pair.threads.start(free.wait)
    await pair.ask("y" * LARGE_BYTES, "y" * LARGE_BYTES)
    pair.shadow.close()
    free.set()
    await soon(blocker)
    await settle()
    assert pair.shadow.outcomes == {CopyOutcome.CANCELLED: 1}


async def test_a_client_s_request_to_the_candidate_counts_meanwhile(pair: Pair) -> None:
    await pair.ask("hi", "hi")
    with pair.candidate.submit(text_request()) as stream:
        (await pair.instances[1].begun()).finish("own")
        assert await soon(read_all(stream)) == ["own"]
    await settle()
    assert counted(pair.candidate)[:4] == (1, 0, 1, 1)


async def test_a_copy_is_sent_once_stable_has_begun_to_answer(pair: Pair) -> None:
    with pair.infer() as stream:
        execution = await pair.instances[0].begun()
        await settle()
        assert pair.instances[1].executions == []
        execution.answer(text_response("a"))
        copy = await pair.instances[1].begun()
        copy.finish("ab")
        await soon(pair.candidate.requests.drained())
        assert pair.shadow.outcomes == {}
        execution.finish("b")
        assert await soon(read_all(stream)) == ["a", "b"]
    assert pair.shadow.outcomes == {CopyOutcome.EQUAL: 1}


async def test_a_request_that_stable_fails_is_copied(pair: Pair) -> None:
    with pair.infer() as stream:
        (await pair.instances[0].begun()).crash(BROKEN)
        with pytest.raises(InferenceError, match="broken"):
            await soon(read_all(stream))
    (await pair.instances[1].begun()).finish("fine")
    await soon(pair.candidate.requests.drained())
    assert pair.shadow.outcomes == {CopyOutcome.NOT_COMPARED: 1}
    assert pair.evidence.ended == [1, 0, 1]


async def test_a_copy_ends_with_its_client(pair: Pair) -> None:
    with pair.infer():
        (await pair.instances[0].begun()).answer(text_response("a"))
        copy = await pair.instances[1].begun()
    await soon(copy.stopped.wait())
    assert pair.shadow.outcomes == {CopyOutcome.CANCELLED: 1}
    assert pair.evidence.ended == [0, 0, 0]


async def test_copies_beyond_the_limit_are_dropped(serve: Serve) -> None:
    pair = Pair(serve, most_in_flight=1)
    for _ in range(3):
        with pair.infer() as stream:
            (await pair.instances[0].begun()).finish("hi")
            await soon(read_all(stream))
    assert pair.shadow.outcomes == {CopyOutcome.DROPPED: 2}
    (family,) = (each for each in pair.shadow.families() if each.name == IN_FLIGHT)
    assert [each.value for each in family.samples] == [1]
    pair.shadow.close()
    await soon(pair.candidate.requests.drained())
    assert pair.shadow.outcomes == {CopyOutcome.DROPPED: 2, CopyOutcome.CANCELLED: 1}
    assert pair.shadow.tap(text_request()) is None


async def test_a_copy_that_was_dropped_is_no_evidence(serve: Serve) -> None:
    pair = Pair(serve, most_in_flight=0)
    for _ in range(25):
        with pair.infer() as stream:
            (await pair.instances[0].begun()).finish("hi")
            await soon(read_all(stream))
        await settle()
    pair.evidence.judge(time.perf_counter_ns() + 2_000_000_000)
    errors, _ = pair.evidence.describe()
    assert (errors["stable"]["requests"], errors["candidate"]["requests"]) == (25, 0)


async def test_a_client_gets_its_response_before_the_copy_is_sent(pair: Pair) -> None:
    sent: list[int] = []
    with pair.infer() as stream:
        stream.listen(lambda: sent.append(len(pair.candidate.requests)))
        (await pair.instances[0].begun()).finish("hi")
        (await pair.instances[1].begun()).finish("hi")
    await soon(pair.candidate.requests.drained())
    assert sent == [0]


async def test_a_candidate_without_an_instance_fails_its_copies(pair: Pair) -> None:
    pair.instances[1].die("gone")
    await settle()
    with pair.infer() as stream:
        (await pair.instances[0].begun()).finish("hi")
        assert await soon(read_all(stream)) == ["hi"]
    await settle()
    assert pair.shadow.outcomes == {CopyOutcome.FAILED: 1}


async def test_a_copy_has_the_lowest_priority_and_no_timeout(serve: Serve) -> None:
    batching = DynamicBatching(priority_levels=3, default_priority_level=1)
    pair = Pair(serve, max_batch_size=4, dynamic_batching=batching)
    copy = pair.shadow.copy_of(text_request(priority=1, timeout_us=5, received_ns=7))
    assert (copy.priority, copy.timeout_us, copy.received_ns, copy.trace) == (3, 0, 0, None)


def of_memory(size: int = 8) -> InferRequest:
    mapped = memoryview(mmap.mmap(-1, size))
    return replace(text_request(), inputs=(Tensor("x", Datatype.INT8, (size,), mapped),))


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: text_request(sequence=SequenceTag(7)),
        of_memory,
        lambda: text_request(outputs=(RequestedOutput("y", region=SharedRegion("r", 8)),)),
        lambda: text_request("x" * (MOST_BYTES + 1)),
    ],
    ids=["sequence", "shared memory", "shared output", "large"],
)
async def test_some_requests_are_never_copied(
    pair: Pair, request_of: Callable[[], InferRequest]
) -> None:
    assert pair.shadow.tap(request_of()) is None
    assert pair.shadow.tap(text_request()) is not None


async def test_a_model_that_calls_others_is_copied_only_with_side_effects(pair: Pair) -> None:
    pair.stable.statistics.calls = 1
    assert pair.shadow.tap(text_request()) is None
    effects = Shadow(*(pair.stable, pair.candidate, pair.evidence, pair.threads), side_effects=True)
    assert effects.tap(text_request()) is not None


async def test_without_the_coin_a_request_is_observed_only(pair: Pair) -> None:
    pair.shadow.share = 0.0
    with pair.infer() as stream:
        (await pair.instances[0].begun()).finish("hi")
        await soon(read_all(stream))
    await settle()
    assert pair.instances[1].executions == []
    assert pair.evidence.ended == [1, 0, 0]


async def test_different_answers_breach_their_guardrail(pair: Pair) -> None:
    for _ in range(25):
        await pair.ask("hi", "ho")
    now = time.perf_counter_ns() + 2_000_000_000
    assert [each.guardrail for each in pair.evidence.judge(now)] == ["differs"]
    shown = pair.evidence.describe()
    assert [each["candidate"]["requests"] for each in shown] == [25, 25]
