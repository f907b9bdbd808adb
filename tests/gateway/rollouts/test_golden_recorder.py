"""Recordings of golden requests: the requests that are recorded, and asked again; their ends."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, RequestedOutput, SequenceTag, SharedRegion
from gateway.models.golden.recorded import GoldenDraft
from gateway.models.model import Model
from gateway.rollouts import golden_recorder
from gateway.rollouts.comparison import MOST_BYTES
from gateway.rollouts.golden_recorder import GoldenRecorder, RecordingLimits
from gateway.stream import ResponseStream
from gateway.tensor import Datatype, Tensor
from gateway.threads import Threads
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


class Studio:
    """A model whose requests are recorded."""

    def __init__(self, serve: Serve, threads: Threads, **options: Any) -> None:
        self.instance = ScriptedInstance()
        self.model = serve(self.instance, config=replace(TEXT, **options))
        self.threads = threads

    def record(self, count: int = 20, secs: float = 60.0, redact: str = "") -> GoldenRecorder:
        limits = RecordingLimits(count=count, secs=secs, redact=redact)
        return GoldenRecorder(self.model, limits, self.threads)

    def infer(self, request: InferRequest) -> ResponseStream:
        """A request of a client, as the data plane sends it."""
        recorder = self.model.recorder
        tap = None if recorder is None else recorder.tap(request, None)
        return self.model.submit(request, tap=tap)

    async def ask(self, text: str = "Capital?", answer: str | InferenceError = "Paris") -> None:
        """A request of a client, and its answer."""
        with self.infer(text_request(text)) as stream:
            execution = await self.instance.begun()
            if isinstance(answer, str):
                execution.finish(answer)
                assert await soon(read_all(stream)) == [answer]
                return
            execution.crash(answer)
            with pytest.raises(InferenceError):
                await soon(read_all(stream))

    async def answer_again(self, *answers: str) -> None:
        """Answer the executions of a request that is asked again."""
        for each in answers:
            (await self.instance.begun()).finish(each)


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    found = Threads("recording", 1)
    yield found
    found.close()


@pytest.fixture
async def studio(serve: Serve, threads: Threads) -> Studio:
    return Studio(serve, threads)


def counted(model: Model) -> tuple[int, ...]:
    """The statistics that the protocol shows."""
    found = model.statistics
    return (found.success.count, found.fail.count, found.inference_count, found.execution_count)


async def line(studio: Studio, recorder: GoldenRecorder, *answers: str) -> dict[str, Any]:
    """The next line, for the answers of a request that is asked again."""
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(recorder.next())
        await studio.answer_again(*answers)
        found: dict[str, Any] = json.loads(await soon(reading) or b"null")
    return found


def dropped(recorder: GoldenRecorder) -> dict[str, int]:
    found: dict[str, int] = json.loads(recorder.counts())["dropped"]
    return found


async def test_a_request_is_asked_three_times_more_and_counts_once(studio: Studio) -> None:
    with studio.record(count=1) as recorder:
        await studio.ask()
        found = await line(studio, recorder, "Paris", "Paris", "Paris")
        assert await soon(recorder.next()) is None
    assert found["golden"]["request"]["inputs"][0]["data"] == ["Capital?"]
    assert found["golden"]["expect"] == {"text": {"equals": "Paris"}}
    assert found["golden"]["why"].startswith("recorded 2")
    assert counted(studio.model) == (1, 0, 1, 1)
    assert json.loads(recorder.counts()) == {
        "recorded": 1,
        "dropped": {},
        "end": "all are recorded",
    }
    assert studio.model.recorder is None


async def test_the_answer_of_the_client_is_one_of_those_that_are_compared(studio: Studio) -> None:
    with studio.record() as recorder:
        await studio.ask(answer="The capital of France is Paris")
        found = await line(studio, recorder, *["The capital of France is Lyon"] * 3)
    assert found["golden"]["expect"] == {"text": {"prefix": "The capital of France is "}}


async def test_it_is_asked_again_at_the_lowest_priority_and_for_no_statistics_of_members(
    serve: Serve, threads: Threads
) -> None:
    batching = DynamicBatching(priority_levels=3, default_priority_level=1)
    studio = Studio(serve, threads, max_batch_size=4, dynamic_batching=batching)
    asked = replace(text_request(priority=1), inputs=(tensor_of_batch("Capital?"),))
    with studio.record() as recorder:
        with studio.infer(asked) as stream:
            (await studio.instance.begun()).finish("Paris")
            await soon(read_all(stream))
        await line(studio, recorder, *["Paris"] * 3)
    requests = [each.requests[0] for each in studio.instance.executions]
    assert [(each.priority, each.uncounted) for each in requests] == [(1, False), *[(3, True)] * 3]


def tensor_of_batch(text: str) -> Tensor:
    return Tensor("text_input", Datatype.BYTES, (1, 1), (text.encode(),))


def many(count: int) -> dict[str, int]:
    return {"others were being recorded": count} if count else {}


async def test_at_most_eight_requests_are_kept_and_no_more_than_are_wanted(
    studio: Studio,
) -> None:
    for wanted, kept in ((20, 8), (3, 3)):
        with studio.record(count=wanted) as recorder:
            for number in range(10):
                await studio.ask(str(number))
            assert dropped(recorder) == many(10 - kept)


@pytest.mark.parametrize(
    ("request_of", "reason"),
    [
        (lambda: text_request(sequence=SequenceTag(7)), "of a sequence or a conversation"),
        (
            lambda: text_request(outputs=(RequestedOutput("y", region=SharedRegion("r", 8)),)),
            "in shared memory",
        ),
        (lambda: text_request("x" * (MOST_BYTES + 1)), "more than 16 MiB"),
    ],
    ids=["sequence", "shared memory", "large"],
)
async def test_requests_that_are_never_copied_are_dropped_by_reason(
    studio: Studio, request_of: Callable[[], InferRequest], reason: str
) -> None:
    with studio.record() as recorder:
        assert recorder.tap(request_of(), None) is None
    assert dropped(recorder) == {reason: 1}


@pytest.mark.parametrize(
    ("original", "again", "reason"),
    [
        (BROKEN, [], "failed: Internal"),
        ("Paris", ["Paris", "Lyon"], "output 'text_output' differs"),
        ("x" * (MOST_BYTES + 1), [], "an answer of more than 16 MiB"),
    ],
    ids=["failed", "differs", "large"],
)
async def test_a_request_without_a_fixed_answer_is_dropped_by_reason(
    studio: Studio, original: str | InferenceError, again: list[str], reason: str
) -> None:
    with studio.record(secs=5.0) as recorder:
        await studio.ask(answer=original)
        if again:
            await studio.ask("Second", "Second")
            await line(studio, recorder, "Paris", *again, *["Second"] * 3)
        assert dropped(recorder) == {reason: 1}


async def test_a_request_that_fails_when_asked_again_is_dropped(studio: Studio) -> None:
    with studio.record() as recorder:
        await studio.ask()
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(recorder.next())
            (await studio.instance.begun()).crash(BROKEN)
            await settle()
            studio.instance.die("gone")
            await settle()
            await studio.threads.run(int)
            await settle()
            recorder.end("enough")
            assert await soon(reading) is None
    assert dropped(recorder) == {"failed when asked again: Internal": 1}
    assert counted(studio.model)[1] == 0


async def test_equal_requests_are_recorded_once(studio: Studio) -> None:
    with studio.record(count=3) as recorder:
        await studio.ask()
        await line(studio, recorder, *["Paris"] * 3)
        await studio.ask()
        await studio.ask("Other")
        await line(studio, recorder, *["Paris"] * 3)
        assert dropped(recorder) == {"recorded already": 1}


async def test_a_redacted_request_is_what_is_asked_again(studio: Studio) -> None:
    with studio.record(redact="Ann|Bob") as recorder:
        await studio.ask("I am Ann", answer="Hello Ann, how are you today?")
        again = "Hello, I am glad to meet you, Bob"
        found = await line(studio, recorder, again, again, again)
    assert studio.instance.asked == ["I am Ann", *["I am [redacted]"] * 3]
    assert found["golden"]["expect"] == {"text": {"prefix": "Hello, I am glad to meet you, "}}
    assert not any(name in json.dumps(found) for name in ("Ann", "Bob"))


async def test_the_texts_of_a_request_are_found_and_replaced_in_threads(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            threads.append(threading.get_ident())
            return method(*given)

        return call

    for name in ("texts", "redact"):
        monkeypatch.setattr(GoldenDraft, name, watched(getattr(GoldenDraft, name)))
    with studio.record(redact="Ann") as recorder:
        await studio.ask("I am Ann")
        assert (await line(studio, recorder, *["Hello"] * 3))["golden"]
    assert len(threads) >= 2
    assert threading.get_ident() not in threads


async def test_a_pattern_that_explodes_drops_the_request(studio: Studio) -> None:
    with studio.record(redact="(a+)+$") as recorder:
        await studio.ask("a" * 40 + "!")
        await studio.ask("b", "c")
        await line(studio, recorder, *["c"] * 3)
    assert dropped(recorder) == {"the pattern to redact takes more than 1 s to search": 1}


async def test_a_recording_ends_at_its_time(studio: Studio) -> None:
    with studio.record(secs=0.1) as recorder:
        assert await soon(recorder.next()) is None
    assert recorder.reason == "the time is over"


async def test_a_recording_ends_before_more_than_its_bytes(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden_recorder, "MOST_LINE_BYTES", 400)
    with studio.record() as recorder:
        await studio.ask()
        assert (await line(studio, recorder, *["Paris"] * 3))["golden"]
        await studio.ask("Other")
        assert await line(studio, recorder, *["Paris"] * 3) is None
    assert "MiB of a recording" in recorder.reason
    assert json.loads(recorder.counts())["recorded"] == 1


async def test_the_end_cancels_the_request_that_is_asked_again(studio: Studio) -> None:
    with studio.record() as recorder:
        await studio.ask()
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(recorder.next())
            execution = await studio.instance.begun()
            recorder.end("enough")
            await soon(execution.stopped.wait())
            assert await soon(reading) is None
    await soon(studio.model.requests.drained())
    assert dropped(recorder) == {}


async def test_a_client_that_disconnects_is_dropped_and_leaves_room(studio: Studio) -> None:
    with studio.record(count=1) as recorder:
        with studio.infer(text_request()):
            (await studio.instance.begun()).answer(text_response("Par"))
        assert dropped(recorder) == {"failed: Cancelled": 1}
        await studio.ask()
        assert await line(studio, recorder, *["Paris"] * 3)


async def test_a_request_that_is_refused_leaves_room(studio: Studio) -> None:
    with studio.record(count=1) as recorder:
        for _ in range(2):
            with pytest.raises(InferenceError):
                studio.infer(InferRequest(model="text"))
        await studio.ask()
        assert await line(studio, recorder, *["Paris"] * 3)


async def test_a_model_has_one_recording_at_a_time(studio: Studio) -> None:
    with studio.record():
        with pytest.raises(InferenceError, match="'text' version 1 is being recorded") as caught:
            studio.record()
        assert caught.value.code is Code.ALREADY_EXISTS
    with studio.record():
        pass


async def test_a_model_that_calls_others_by_itself_is_refused(studio: Studio) -> None:
    studio.model.statistics.calls = 1
    with pytest.raises(InferenceError, match="make requests to other servers or models"):
        studio.record()


async def test_the_recording_of_a_version_ends_when_it_is_unloaded(
    serve: Serve, threads: Threads
) -> None:
    studio = Studio(serve, threads)
    with studio.record() as recorder:
        await soon(studio.model.close())
        assert await soon(recorder.next()) is None
    assert recorder.reason == "the version was unloaded"
